"""Settings: defaults, config files, the command line; input and output of the scripts."""

import os
import runpy
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from conftest import REPO, ok

import configurator
from configurator import InputError, configure, get_defaults, read_config
from model import MHFConfig


def configured(script, *argv):
    """Returns the settings of a script whose command line is argv."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', [script, *map(str, argv)])
        return configure(get_defaults(script) | {'__file__': str(REPO / script), '__name__': '__main__'})


def train(folder, file, *argv):
    """Returns the settings of train.py for a config file with the text `file`, then argv."""
    (folder / 'c.py').write_text(file, encoding='utf-8', errors='replace')
    return configured('train.py', folder / 'c.py', *argv)


def test_accepts(tmp_path):
    """An int for a float, None, a value with '=', a bare --flag, private names and a byte order mark are accepted."""
    file = '\ufeffimport math\n_n = 3\nmax_steps = int(math.pi) * _n\nlearning_rate = 1\nmax_new_tokens = 7\n'
    argv = ('--weight_decay=0', '--out_dir=a=b', '--wandb', '--compile=None', '--device=cpu', '--dataset=1')
    got = train(tmp_path, file, *argv)
    assert got['max_steps'] == 9 and got['learning_rate'] == 1.0 and isinstance(got['learning_rate'], float)
    assert got['weight_decay'] == 0.0 and got['out_dir'] == 'a=b' and got['wandb'] is True and got['compile'] is None
    assert got['device'] == 'cpu' and got['dataset'] == '1' and 'max_new_tokens' not in got and '_n' not in got
    got = train(tmp_path, 'max_steps = 4', '--max_steps=1e3', '--compile')
    assert got['compile'] is True and got['max_steps'] == 1000


@pytest.mark.parametrize('setting, value', [('out_dir', '~'), ('dataset', 'a.txt,~/b.txt@2e9'), ('data_dir', '~/x')])
def test_paths_are_expanded(tmp_path, setting, value):
    """~ at the start of a path becomes the home folder, on the command line and in a file, but not in a prompt."""
    expanded = value.replace('~', str(Path.home()))
    assert train(tmp_path, '', f'--{setting}={value}')[setting] == expanded
    assert train(tmp_path, f'{setting} = {value!r}')[setting] == expanded
    assert configured('sample.py', '--start=~/x')['start'] == '~/x'


PRINTS = """
from configurator import configure
lines = 1
config = configure(globals())
for _ in range(lines):
    print('caf\u00e9 ' * 20)
"""


def shell(folder, command, **environment):
    """Runs a command in a folder with a.py, which prints --lines=n lines. Returns a subprocess.CompletedProcess."""
    (folder / 'a.py').write_text(PRINTS, encoding='utf-8')
    path = f'{Path(sys.executable).parent}:{os.environ["PATH"]}'
    environment = os.environ | dict(PYTHONPATH=str(REPO), PATH=path) | environment
    return subprocess.run(command, shell=True, cwd=folder, capture_output=True, env=environment)


def test_characters_that_the_output_lacks_are_replaced(tmp_path):
    """An output without UTF-8 receives question marks."""
    done = shell(tmp_path, 'python a.py', PYTHONIOENCODING='ascii')
    assert done.returncode == 0 and done.stdout.startswith(b'caf? caf? '), done.stderr


@pytest.mark.parametrize('lines', [1, 10_000])
def test_a_closed_pipe(tmp_path, lines):
    """A script ends silently if the reader of its output exits, during the output and at its end."""
    # buffered, so that one line is written at the end
    done = shell(tmp_path, f'(sleep 0.2; exec python a.py --lines={lines}) | head -0', PYTHONUNBUFFERED='')
    assert done.stderr == b''


def test_an_argument_that_is_not_text(tmp_path):
    """An argument with invalid UTF-8 is refused in one line before any work."""
    done = shell(tmp_path, b'python a.py --lines=\xff')
    assert done.returncode == 1 and done.stdout == b''
    assert done.stderr == b"error: argument '--lines=\\udcff' is not valid utf-8; encode it as utf-8\n"


def test_the_command_line_overrides_files(tmp_path):
    """--key=value overrides config files in any order, and a later config file overrides an earlier one."""
    (tmp_path / 'a.py').write_text('max_steps = 4\nseed = 1\nbeta1 = 0.5')
    got = train(tmp_path, 'max_steps = 5\nseed = 2', '--seed=3', tmp_path / 'a.py')
    assert (got['max_steps'], got['seed'], got['beta1']) == (4, 3, 0.5)


# on the command line, or in a file; test_bad_input.py has more
REFUSED = [
    ('--max_steps=1.5', 'max_steps=1.5 is float, expected int'),
    ('--max_steps=None', 'max_steps=None is NoneType'),
    ('--learning_rate=fast', "learning_rate='fast' is str"),
    (f'--learning_rate={10**400}', 'is int, expected float'),
    ('--wandb=1', 'wandb=1 is int, expected bool'),
    ('--max_stepps=1', "did you mean 'max_steps'"),
    ('--max_steps=((((', 'is str, expected int'),
    ('max_steps = "4"', 'max_steps'),
    ('1/0', 'c.py: ZeroDivisionError'),
    ('x = [', 'SyntaxError: .*line 1'),
    ('from math import pi', "unknown setting 'pi'"),
]


@pytest.mark.parametrize('wrong, culprit', REFUSED)
def test_refuses(tmp_path, wrong, culprit):
    """Unknown names, wrong types and errors in a config file are reported in one line."""
    with pytest.raises(InputError, match=culprit) as e:
        train(tmp_path, '', *wrong.split()) if wrong.startswith('--') else train(tmp_path, wrong)
    assert '\n' not in str(e.value)


SCRIPT = '''"""Does it."""

import sys

# size
x = 5 * 8  # its width
wide = 2 * x
# of two
# lines
name = None
config = configure(globals())
C = 3
'''


def test_expressions(tmp_path, monkeypatch, capsys):
    """Defaults can be expressions, an imported script ignores the command line, and --help prints every comment."""
    (tmp_path / 'a.py').write_text(SCRIPT)
    monkeypatch.setattr(configurator, 'HERE', tmp_path)
    monkeypatch.setattr(configurator, 'SCRIPTS', ('a.py',))

    def run(*argv, name='__main__'):
        monkeypatch.setattr(sys, 'argv', ['a.py', *argv])
        return runpy.run_path(tmp_path / 'a.py', dict(configure=configure), name)

    assert get_defaults('a.py') == dict(x=40, wide=80, name=None) and run('--x=7')['x'] == 7
    imported = run('--x=7', name='a')
    assert imported['x'] == 40 and imported['config'] == get_defaults('a.py')
    with pytest.raises(SystemExit, match='0'):
        run('--help')
    shown = capsys.readouterr().out
    assert shown.startswith(
        'Does it.\n\nsettings:\n\n  # size\n  --x=5 * 8  # its width\n  --wide=2 * x\n\n  # of two\n'
    )
    assert shown.endswith('  # lines\n  --name=None\n')


def test_configs_are_the_paper_s():
    """The configs of the paper's models have its sizes, schedules and optimizer (SPEC.md, section 8)."""
    sizes = 'hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim learning_rate max_steps'.split()
    paper = {
        '100m': (768, 2560, 12, 12, 2, 64, 5e-4, 20000),
        '1b': (2048, 6144, 20, 16, 8, 128, 3e-4, 200000),
        '3b': (2048, 11008, 36, 16, 2, 128, 2e-4, 200000),
    }
    same = dict(warmup_steps=2000, lr_decay_steps=0, batch_size=256, block_size=2048, beta1=0.9, beta2=0.999)
    same |= dict(weight_decay=0.1, grad_clip=1.0, seed=42, embedding_lr_mult=1.0, loss='product')
    same |= dict(encoder_init='normal', embedding_scale=1.0, ablation='', num_lsh=0, single_id=False)
    for size, values in paper.items():
        for name, H, B in ((f'mhf_{size}', 4, 16384), (f'standard_{size}', 0, 16384)):
            got = configured('train.py', f'config/{name}.py')
            expected = dict(zip(sizes, values, strict=True)) | same | dict(num_hashes=H, num_buckets=B)
            assert {key: got[key] for key in expected} == expected
    for size in ('100m', '1b'):
        got = configured('train.py', f'config/mhf_{size}_h3b10k.py')
        changed = dict(num_hashes=3, num_buckets=10624, out_dir=got['out_dir'])
        assert got == configured('train.py', f'config/mhf_{size}.py') | changed
    assert read_config('config/standard_1b_2l.py')['num_layers'] == 22


@pytest.mark.parametrize('script', configurator.SCRIPTS)
def test_help(script, tmp_path):
    """--help prints the script's launch line and all settings."""
    done = ok(script, '--help', cwd=tmp_path)
    assert f'python {script}' in done.stdout and all(f'--{k}=' in done.stdout for k in get_defaults(script))


def test_scripts_agree_on_defaults():
    """A setting that two scripts share has one default, and MHFConfig has the defaults of train.py."""
    all_settings = [get_defaults(s) for s in configurator.SCRIPTS]
    for key in set().union(*all_settings):
        # sample.py and eval.py find the newest out_dir; expand.py writes the tokenizer that the others read
        if key not in ('out_dir', 'tokenizer', 'seed'):
            assert len({repr(s[key]) for s in all_settings if key in s}) == 1, key
    train = get_defaults('train.py')
    fields = asdict(MHFConfig())
    assert {k: v for k, v in train.items() if k in fields} == {k: fields[k] for k in fields if k in train}
