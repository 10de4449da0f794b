"""The repository: imports point one way, scripts -> mhf/ -> model, hashing -> configurator; the Makefile installs."""

import re
import shutil
import subprocess
import sys

import pytest
from conftest import REPO


def test_imports_point_one_way():
    """No file imports a script, and model.py imports nothing of this repository."""
    scripts = r'^ *(from|import) (train|prepare|sample|eval|expand|bench)\b'
    for path in (*REPO.glob('*.py'), *REPO.glob('mhf/*.py'), *REPO.glob('study/*.py')):
        assert not re.search(scripts, path.read_text(encoding='utf-8'), re.MULTILINE), path
    imports = r'^ *(from|import) (mhf|configurator|hashing)\b'
    assert not re.search(imports, (REPO / 'model.py').read_text(encoding='utf-8'), re.MULTILINE)


# simulates a Python of another version and records its arguments
PYTHON = """#!/bin/sh
echo "$@" >> calls
if [ "$1" = -c ]; then exec {python} -c "import sys; sys.version = '{version}'; sys.version_info = ({tuple}); $2"; fi
"""


@pytest.mark.skipif(not shutil.which('make'), reason='no make')
@pytest.mark.parametrize(
    'version, code, line', [('3.10.4', 2, 'error: Python 3.10.4 is older than 3.11'), ('3.12.1', 0, '')]
)
def test_make_needs_a_current_python(tmp_path, version, code, line):
    """`make` refuses an older Python in one line before it installs, and replaces the .venv of another Python."""
    for name in ('Makefile', 'requirements.txt'):
        shutil.copy(REPO / name, tmp_path)
    fake = PYTHON.format(python=sys.executable, version=version, tuple=version.replace('.', ', '))
    (tmp_path / '.venv/bin').mkdir(parents=True)
    for path in ('python', '.venv/bin/python'):
        (tmp_path / path).write_text(fake)
        (tmp_path / path).chmod(0o755)
    command = ['make', '.venv/installed', 'PYTHON=./python']
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code and done.stderr.startswith(line), done.stderr
    assert ('-m venv --clear .venv' in (tmp_path / 'calls').read_text()) == (code == 0)
