"""Settings: defaults, config files, the command line."""

import runpy
import sys
from dataclasses import asdict

import pytest
from conftest import FUZZ, REPO, ok
from hypothesis import given, settings
from hypothesis import strategies as st

import configurator
from configurator import InputError, configure, declared, read_config, wrong_type
from model import MHFConfig


def configured(script, *argv, name='__main__'):
    """What configure() gives a script whose command line is argv."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', [script, *map(str, argv)])
        return configure({'__file__': str(REPO / script), '__name__': name})


@pytest.fixture
def train(tmp_path):
    """train.py with a config file that holds `file`."""

    def configured_train(*argv, file=''):
        (tmp_path / 'c.py').write_text(file)
        return configured('train.py', tmp_path / 'c.py', *argv)

    return configured_train


def test_accepts(train):
    """An int for a float, None, a value with '=', a bare --flag or a file's own names are turned away or mangled."""
    file = 'import math\n_n = 3\nmax_steps = int(math.pi) * _n\nlearning_rate = 1\nwandb = False\nmax_new_tokens = 7\n'
    argv = ('--weight_decay=0', '--out_dir=a=b', '--wandb', '--compile=None', '--device=cpu', '--dataset=1')
    got = train(*argv, file=file)
    assert got['max_steps'] == 9 and got['learning_rate'] == 1.0 and isinstance(got['learning_rate'], float)
    assert got['weight_decay'] == 0.0 and got['out_dir'] == 'a=b' and got['wandb'] is True and got['compile'] is None
    assert got['device'] == 'cpu' and got['dataset'] == '1' and 'max_new_tokens' not in got and '_n' not in got
    assert train('--compile')['compile'] is True and train('--max_steps=1e3')['max_steps'] == 1000
    assert train('--max_steps=5', file='max_steps = 4')['max_steps'] == 5


@pytest.mark.parametrize(
    'argv, file, culprit',
    [
        (['--learningrate=1'], '', "did you mean 'learning_rate'"),
        ([], 'num_bucket = 4', "'num_bucket'; did you mean 'num_buckets'"),
        ([], 'max_steps = "4"', 'max_steps'),
        (['--max_steps=1.5'], '', 'max_steps=1.5 is float, expected int'),
        (['--max_steps=True'], '', 'max_steps=True is bool'),
        (['--max_steps=None'], '', 'max_steps=None is NoneType'),
        (['--max_steps'], '', '--max_steps needs a value'),
        (['--learning_rate=fast'], '', "learning_rate='fast' is str"),
        ([f'--learning_rate={10**400}'], '', 'is int, expected float'),
        (['--wandb=1'], '', 'wandb=1 is int, expected bool'),
        (['--temperature=1'], '', 'sample.py has it'),
        (['--max_stepps=1', '--sede=1'], '', "max_steps'.*, and .*'seed'"),
        ([], '1/0', 'line 1: ZeroDivisionError'),
        ([], 'x = [', 'line 1: SyntaxError'),
        ([], 'from math import pi', "unknown setting 'pi'"),
        ([], '\nfrom config.mhf_1 import *', 'line 2: ModuleNotFoundError'),
        (['nowhere.py'], '', "no config file 'nowhere.py'"),
    ],
)
def test_refuses(train, argv, file, culprit):
    """A typo runs for a week with the default instead."""
    with pytest.raises(InputError, match=culprit) as e:
        train(*argv, file=file)
    assert '\n' not in str(e.value)


def test_wrong_type():
    """A damaged file's values are taken for what they are not, or whole ones are refused."""
    like = dict(a=int, b=[dict(c=(str, type(None)))], d=dict, e=list, f=bool)
    whole = dict(a=1, b=[dict(c='x'), dict(c=None)], d=dict(x=1), e=[2], f=True, more=0)
    assert wrong_type(whole, like) == '' and wrong_type(whole | dict(a=True), like, 'm') == 'm.a=True'
    assert wrong_type(whole | dict(b=[dict(c='x'), dict(c=3)]), like) == 'it.b[1].c=3'
    assert wrong_type(whole | dict(b=[{}]), like) == 'it.b[0] without c' and wrong_type([], like) == 'it=[]'
    assert wrong_type(whole | dict(d=[]), like) == 'it.d=[]' and wrong_type({}, dict(b=int, a=int)) == 'it without a, b'


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """Makes a folder of scripts, with their text, the one whose settings there are."""

    def write(**texts):
        for name, text in texts.items():
            (tmp_path / f'{name}.py').write_text(text)
        monkeypatch.setattr(configurator, 'HERE', tmp_path)
        monkeypatch.setattr(configurator, 'SCRIPTS', tuple(f'{name}.py' for name in texts))

    declared.cache_clear()
    yield write
    declared.cache_clear()


SCRIPT = '''"""Does it."""

import sys

# size
x = 5 * 8
wide = 2 * x
name = None
config = configure(globals())
C = 3
'''


def test_expressions(scripts, tmp_path, monkeypatch, capsys):
    """nanoGPT's idiom, `x = 5 * 8`, is no default, or its type isn't known."""
    scripts(a=SCRIPT)
    assert declared('a.py') == dict(x=40, wide=80, name=None)
    monkeypatch.setattr(sys, 'argv', ['a.py', '--x=7'])
    assert runpy.run_path(tmp_path / 'a.py', dict(configure=configure), '__main__')['x'] == 7
    # an imported script keeps its defaults, whatever the command line says
    imported = runpy.run_path(tmp_path / 'a.py', dict(configure=configure), 'a')
    assert imported['x'] == 40 and imported['config'] == dict(x=40, wide=80, name=None)
    monkeypatch.setattr(sys, 'argv', ['a.py', '--x=seven'])
    with pytest.raises(InputError, match="x='seven' is str, expected int"):
        runpy.run_path(tmp_path / 'a.py', dict(configure=configure), '__main__')
    monkeypatch.setattr(sys, 'argv', ['a.py', '--help'])
    with pytest.raises(SystemExit, match='0'):
        runpy.run_path(tmp_path / 'a.py', dict(configure=configure), '__main__')
    assert capsys.readouterr().out == 'Does it.\n\nsettings:\n  --x=40\n  --wide=80\n  --name=None\n'


@pytest.mark.parametrize(
    'line',
    ['print(1)', 'B = 4', 'import os', 'x.y = 3', 'b = a = 3', 'x += 1', 'def f(): pass', 'b = sys.argv', 'b = 1/0'],
)
def test_a_stray_line(scripts, line):
    """A line that is no setting silently ends the settings, and those after it cannot be set."""
    scripts(a='"""Fine."""\ny = 1\nconfig = configure(globals())\n', b=SCRIPT.replace('name = None', line))
    with pytest.raises(InputError, match=r'^b\.py, line 8: '):
        configured('b.py', '--x=3')


def test_configs_inherit(train, monkeypatch, tmp_path):
    """A variant has to repeat its paper's model, or changes what it inherits from."""
    file = 'from config.mhf_100m import *\n\nnum_layers = 3\n'
    monkeypatch.chdir(tmp_path)
    got, base = train(file=file), configured('train.py', 'config/mhf_100m.py')
    assert got == base | dict(num_layers=3) and base['num_layers'] == 12
    assert read_config('config/standard_1b_2l.py')['num_layers'] == read_config('config/mhf_1b.py')['num_layers'] + 2


known = sorted({name for script in configurator.SCRIPTS for name in declared(script)})
values = st.one_of(
    st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=12), st.lists(st.integers(), max_size=2)
)
odd = ['1e3', '0x10', '1_000', '9' * 400, '9' * 5000, '((((', '[' * 200, '"', "'a", '\x00', 'nan']
spelled = st.builds(repr, values) | st.sampled_from(odd)
names = st.sampled_from(known) | st.text(max_size=8).filter(lambda t: 'h' not in t)
pairs = st.lists(st.tuples(names, spelled), max_size=4)


@settings(max_examples=FUZZ, deadline=None)
@given(pairs, pairs)
def test_fuzz(tmp_path_factory, on_the_command_line, in_the_file):
    """Some setting or config file ends in a traceback, is taken with another type, or writes something."""
    folder = tmp_path_factory.mktemp('c')
    file = ''.join(f'{k} = {v}\n' for k, v in in_the_file)
    (folder / 'c.py').write_text(file, encoding='utf-8', errors='replace')
    defaults = declared('train.py')
    try:
        got = configured('train.py', folder / 'c.py', *(f'--{k}={v}' for k, v in on_the_command_line))
        assert got.keys() == defaults.keys()
        assert all(defaults[k] is None or type(v) is type(defaults[k]) for k, v in got.items())
    except InputError as e:
        assert e.code == f'error: {e}' and '\n' not in str(e)
    assert [p.name for p in folder.iterdir()] == ['c.py']


@pytest.mark.parametrize('script', configurator.SCRIPTS)
def test_help(script, tmp_path):
    """--help shows another script's text, or leaves settings out."""
    done = ok(script, '--help', cwd=tmp_path)
    assert f'python {script}' in done.stdout and all(f'--{k}=' in done.stdout for k in declared(script))


def test_scripts_agree_on_defaults():
    """A setting that two scripts share has two defaults: `prepare.py` and `train.py` alone would not fit together."""
    all_settings = [declared(s) for s in configurator.SCRIPTS]
    for key in known:
        # what expand.py writes to is what train.py starts from
        if key not in ('out_dir', 'tokenizer', 'seed', 'device', 'dtype', 'init_from'):
            assert len({repr(s[key]) for s in all_settings if key in s}) == 1, key
    train, fields = declared('train.py'), asdict(MHFConfig())
    assert {k: v for k, v in train.items() if k in fields} == {k: fields[k] for k in fields if k in train}
