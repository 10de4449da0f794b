"""Settings: defaults, config files, the command line; input and output of the scripts."""

import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from conftest import REPO, default_settings

import configurator
from configurator import configure, read_config
from mhf.errors import InputError
from model import MHFConfig


def configured(script, *argv):
    """Returns the settings of a script whose command line is argv."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', [script, *map(str, argv)])
        return configure(default_settings(script) | {'__file__': str(REPO / script), '__name__': '__main__'})


def train(folder, file, *argv):
    """Returns the settings of train.py for a config file with the text `file`, then argv."""
    (folder / 'c.py').write_text(file, encoding='utf-8', errors='replace')
    return configured('train.py', folder / 'c.py', *argv)


def test_accepts(tmp_path):
    """
    An int for a float, 1e3 for an int, None, a value with '=', a bare --flag, private names, a byte order mark and ~ in
    a path are accepted. The command line overrides files, and a later file an earlier one.
    """
    file = '\ufeffimport math\n_n = 3\nmax_steps = int(math.pi) * _n\nlearning_rate = 1\nmax_new_tokens = 7\nseed = 2\n'
    (tmp_path / 'a.py').write_text('warmup_steps = 4\nseed = 1\nbeta1 = 0.5')
    flags = '--weight_decay=0 --out_dir=a=b --wandb --compile=None --dataset=a.txt,~/b.txt@2e9 --seed=3 --loss=true'
    got = train(tmp_path, file, *flags.split(), '--warmup_steps=1e3', tmp_path / 'a.py')
    changed = dict(max_steps=9, learning_rate=1.0, weight_decay=0.0, out_dir='a=b', wandb=True, compile=None)
    changed |= dict(dataset=f'a.txt,{Path.home()}/b.txt@2e9', warmup_steps=1000, seed=3, beta1=0.5, loss='true')
    assert got == default_settings('train.py') | changed and isinstance(got['learning_rate'], float)


# prints a character that an output may lack
PRINTS = """
from configurator import configure
copies = 1
config = configure(globals())
print('caf\u00e9 ' * copies)
"""


def shell(folder, command, **environment):
    """Runs a command in a folder with a.py, which contains PRINTS. Returns a subprocess.CompletedProcess."""
    (folder / 'a.py').write_text(PRINTS, encoding='utf-8')
    path = f'{Path(sys.executable).parent}:{os.environ["PATH"]}'
    environment = os.environ | dict(PYTHONPATH=str(REPO), PATH=path) | environment
    return subprocess.run(['bash', '-c', command], cwd=folder, capture_output=True, env=environment)


def test_any_stdout(tmp_path):
    """A script runs with an output that lacks a character, and without stdout. A closed pipe ends it silently."""
    assert shell(tmp_path, 'python a.py', PYTHONIOENCODING='ascii').stdout == b'caf? \n'
    assert shell(tmp_path, 'python a.py >&-').returncode == 0
    assert shell(tmp_path, 'python a.py --copies=99999 | true').stderr == b''


# on the command line, or in a file; test_bad_input.py has more
REFUSED = [
    ('--max_stepps=1', "train.py: unknown setting 'max_stepps'; did you mean 'max_steps'"),
    ('--init_from=', 'init_from is empty'),
    ('--max_steps', 'max_steps=True is bool, expected int'),
    ('--compile=false', 'compile=false: write True or False'),
    ('from math import pi', "c.py: unknown setting 'pi'"),
]


@pytest.mark.parametrize('wrong, culprit', REFUSED)
def test_refuses(tmp_path, wrong, culprit):
    """Unknown names, missing values and wrong types are refused."""
    with pytest.raises(InputError, match=culprit):
        train(tmp_path, '', wrong) if wrong.startswith('--') else train(tmp_path, wrong)


FORK = '''"""Does it."""

import numpy as np
from configurator import configure


def double(x):
    # a comment of the helper
    return 2 * x


# size
x = double(20)  # its width
dtype = (
    'bfloat16' if x > 99 else 'float32'
)
scale = np.sqrt(4)
windows = [64, 128]
globals().update(computed=1)
config = configure(globals())
print(config)
'''


def test_a_fork(tmp_path):
    """
    A default may be any expression below a function; one line is a setting on the command line and in a file. Lists are
    settings, a number of numpy becomes a float. --help prints the docstring and each setting with its comments.
    """
    shutil.copy(REPO / 'configurator.py', tmp_path)
    (tmp_path / 'fork.py').write_text(FORK)
    (tmp_path / 'c.py').write_text('x = 50\ncopies = 3')
    (tmp_path / 'd.py').write_text('computed = 2\nwindows = [8]')
    defaults = dict(x=40, dtype='float32', scale=2.0, windows=[64, 128], computed=1)
    for args, changes in {
        'c.py d.py': dict(x=50, windows=[8], computed=2),
        '--x=7 --dtype=bfloat16 --windows=[]': dict(x=7, dtype='bfloat16', windows=[]),
    }.items():
        assert shell(tmp_path, f'python fork.py {args}').stdout.decode() == f'{defaults | changes}\n'
    # a.py reads the settings of fork.py
    assert shell(tmp_path, 'python a.py c.py').stdout.count(b'caf') == 3
    assert shell(tmp_path, 'python -c "import fork" --x=7').stdout.decode() == f'{defaults}\n'
    settings = FORK[FORK.index('# size') : FORK.index('\nconfig = ')]
    shown = f'Does it.\n\n# settings: --name=value\n\n{settings}\n'
    assert shell(tmp_path, 'python fork.py --help').stdout.decode() == shown


def test_configs_are_the_paper_s():
    """The configs of the paper's models have its sizes, schedules and optimizer."""
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


def test_scripts_agree_on_defaults():
    """
    A setting that two scripts share has one default. A field of MHFConfig that the data do not decide is a setting of
    train.py with the same default.
    """
    all_settings = [default_settings(s) for s in configurator.SCRIPTS]
    for key in set().union(*all_settings):
        # sample.py and eval.py find the newest out_dir; expand.py writes the tokenizer that the others read
        if key not in ('out_dir', 'tokenizer', 'seed'):
            assert len({repr(s[key]) for s in all_settings if key in s}) == 1, key
    train = default_settings('train.py')
    fields = asdict(MHFConfig())
    for name in ('vocab_size', 'pad_id', 'frequency_ranges'):
        del fields[name]
    assert {name: train.get(name) for name in fields} == fields
