"""The repository: imports point one way, scripts -> mhf/ -> model, hashing -> configurator; the Makefile installs."""

import ast
import shutil
import subprocess
import sys

import pytest
from conftest import REPO

SCRIPTS = {'train', 'prepare', 'sample', 'eval', 'expand', 'bench'}
GROUND = {'configurator': set(), 'hashing': {'configurator'}, 'model': set()}


def imported(path):
    """Returns the modules of this repository that a file imports: mhf.chunked, model, study.rows ..."""
    names = set()
    # without the command of a module, `if __name__ == '__main__'`
    source, _, _ = path.read_text(encoding='utf-8').partition("\nif __name__ == '__main__':")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # an imported name may be a module: from mhf import kernels
            names |= {f'{node.module}.{alias.name}' for alias in node.names} | {node.module}
    modules = {'.'.join(file.relative_to(REPO).with_suffix('').parts) for file in REPO.glob('[!.]*/*.py')}
    modules |= {file.stem for file in REPO.glob('*.py')}
    return names & modules


def test_imports_point_one_way():
    """No file imports a script, model.py does not import mhf/, and mhf/ has no import cycle."""
    for name, allowed in GROUND.items():
        assert imported(REPO / f'{name}.py') <= allowed, name
    imports = {}
    for path in (*REPO.glob('mhf/*.py'), *REPO.glob('study/*.py'), *(REPO / f'{name}.py' for name in SCRIPTS)):
        assert not imported(path) & SCRIPTS, path
        if path.parent.name == 'mhf':
            imports[f'mhf.{path.stem}'] = {name for name in imported(path) if name not in GROUND}
    while imports:
        leaves = {name for name, imported_names in imports.items() if not imported_names & imports.keys()}
        assert leaves, f'an import cycle among {sorted(imports)}'
        for name in leaves:
            del imports[name]


# simulates a Python of another version and records its arguments
PYTHON = """#!/bin/sh
echo "$@" >> calls
if [ "$1" = -c ]; then exec {python} -c "import sys; sys.version = '{version}'; sys.version_info = ({tuple}); $2"; fi
"""


@pytest.mark.skipif(not shutil.which('make'), reason='no make')
@pytest.mark.parametrize(
    'python, venv, code, line, creates',
    [
        ('3.10.4', '3.10.4', 2, 'error: Python 3.10.4 is older than 3.11', False),
        ('3.12.1', '3.10.4', 0, '', True),
        ('3.10.4', '3.12.1', 0, '', False),
    ],
)
def test_make_needs_a_current_python(tmp_path, python, venv, code, line, creates):
    """`make` refuses an older Python in one line before it installs, and replaces only a .venv of an older Python."""
    for name in ('Makefile', 'requirements.txt'):
        shutil.copy(REPO / name, tmp_path)
    (tmp_path / '.venv/bin').mkdir(parents=True)
    for path, version in {'python': python, '.venv/bin/python': venv}.items():
        fake = PYTHON.format(python=sys.executable, version=version, tuple=version.replace('.', ', '))
        (tmp_path / path).write_text(fake)
        (tmp_path / path).chmod(0o755)
    command = ['make', '.venv/installed', 'PYTHON=./python']
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code and done.stderr.startswith(line), done.stderr
    assert ('-m venv --clear .venv' in (tmp_path / 'calls').read_text()) == creates
