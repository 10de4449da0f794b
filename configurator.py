"""
The settings of a script: its own defaults, then config files, then --key=value on the command line.

    $ python train.py config/mhf_tiny.py --max_steps=100 --wandb

A script's settings are its lower-case globals that are numbers, strings, True, False or None when it calls

    config = configure(globals())     # overrides them; an imported script keeps its defaults

Config files are Python and run as such; what they assign must be a setting of some script here, so one file serves all.
A variant begins with `from config.mhf_1b import *`. Names that begin with _ are the file's own. Every unknown name,
missing value or wrong type is refused, all of them at once. Bad input of any kind is an InputError.
"""

import ast
import difflib
import functools
import math
import re
import sys
import textwrap
import traceback
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = ('prepare.py', 'train.py', 'sample.py', 'bench.py', 'eval.py', 'expand.py')


class InputError(SystemExit, ValueError):
    """Bad input from the user: a ValueError. Uncaught it ends a script with one line, 'error: ...', and exit code 1."""

    def __init__(self, message):
        super().__init__(' '.join(str(message).splitlines()))
        self.code = f'error: {self}'


def did_you_mean(word, known):
    """'; did you mean X?' for the known word nearest to `word`, or ''."""
    near = difflib.get_close_matches(str(word), [str(k) for k in known], n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ''


def check_numbers(settings, above_zero='', not_negative=''):
    """Raises InputError where a setting is outside its range. Both are names, separated by spaces."""
    for name in above_zero.split():
        if not 0 < settings[name] < math.inf:
            raise InputError(f'{name}={settings[name]}: must be above 0')
    for name in not_negative.split():
        if not 0 <= settings[name] < math.inf:
            raise InputError(f'{name}={settings[name]}: must not be negative')


def wrong_type(value, like, name='it'):
    """
    The first place in a value read from a file that has another type than `like` says, or ''. `like` is a type, a tuple
    of types, {key: like}, whose keys must be there, or [like], any number of them.
    """
    kind = type(like) if isinstance(like, (dict, list)) else like
    # True is an int for Python
    if not isinstance(value, kind) or isinstance(value, bool) and kind is not bool:
        return f'{name}={value!r:.50}'
    if isinstance(like, dict) and (missing := like.keys() - value.keys()):
        return f'{name} without {", ".join(sorted(missing))}'
    parts = []
    if isinstance(like, dict):
        parts = [(value[k], v, f'{name}.{k}') for k, v in like.items()]
    elif isinstance(like, list):
        parts = [(v, like[0], f'{name}[{k}]') for k, v in enumerate(value)]
    return next(filter(None, (wrong_type(*part) for part in parts)), '')


def head_of(script):
    """The text of a script's settings: `name = value` lines and their comments, up to its configure(globals())."""
    above, _, _ = (HERE / script).read_text(encoding='utf-8').partition('\nconfig = configure(')
    first = re.search(r'^(#.*\n)*[a-z]\w* = ', above, re.MULTILINE)
    return above[first.start() :]


@functools.cache
def settings_of(script):
    """{name: default} of the settings of a script of this repository, from running their lines."""
    settings = {}
    exec(head_of(script), {}, settings)
    return settings


def converted(key, value, default):
    """`value` as the type of `default`, or InputError. A default of None takes anything: the script checks it."""
    kinds = type(value), type(default)
    # 1 for 1.0, or 1e5 for 100000
    if kinds == (int, float) and abs(value) < 1e308 or kinds == (float, int) and value.is_integer():
        return type(default)(value)
    if default is None or type(value) is type(default):
        return value
    raise InputError(f'{key}={value!r} is {type(value).__name__}, expected {type(default).__name__} (like {default!r})')


def parsed(text, default):
    """The value of --key=text: text itself where a string is wanted, else a Python literal, else text."""
    if isinstance(default, str):
        return text
    try:
        return ast.literal_eval({'true': 'True', 'false': 'False', 'none': 'None'}.get(text, text))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def read_config(path):
    """The settings that the config file `path` makes, checked. Raises InputError with every problem in it."""
    found = next((p for p in (Path(path), HERE / path) if p.is_file()), None)
    if found is None:
        near = did_you_mean(path, [p.relative_to(HERE) for p in HERE.glob('config/*.py')])
        raise InputError(f"no config file '{path}'{near} (settings are given as --key=value)")
    scope = {'__file__': str(found)}
    try:
        exec(compile(found.read_text(encoding='utf-8'), str(found), 'exec'), scope)
    # whatever the file's own code raises
    except Exception as e:
        lines = [frame.lineno for frame in traceback.extract_tb(e.__traceback__) if frame.filename == str(found)]
        line = lines[-1] if lines else getattr(e, 'lineno', None)
        raise InputError(f'{path}, line {line}: {type(e).__name__}: {" ".join(str(e).split())}') from None
    known = {name for script in SCRIPTS for name in settings_of(script)}
    settings = {k: v for k, v in scope.items() if k[0] != '_' and not isinstance(v, types.ModuleType)}
    unknown = [f"unknown setting '{key}'{did_you_mean(key, known)}" for key in settings if key not in known]
    if unknown:
        raise InputError(f'{path}: {", and ".join(unknown)}')
    return settings


def print_help(scope):
    """Prints a script's docstring and its settings, with their comments."""
    settings = re.sub(r'^(\w+) = ', r'--\1=', head_of(Path(scope['__file__']).name), flags=re.MULTILINE)
    groups = re.sub(r'^((#.*\n)+)', r'\n\1', settings, flags=re.MULTILINE)
    print(scope['__doc__'].strip(), 'settings:\n' + textwrap.indent(groups, '  '), sep='\n\n')


def configure(scope):
    """
    Overrides the settings among the globals `scope` of a script from the command line; returns them all as a dict. A
    script that is imported keeps its defaults. Raises InputError with every problem.
    """
    script = Path(scope['__file__']).name
    kinds = (bool, int, float, str, type(None))
    defaults = {k: v for k, v in scope.items() if k[0] != '_' and k.islower() and isinstance(v, kinds)}
    argv = sys.argv[1:] if scope['__name__'] == '__main__' else []
    if '--help' in argv or '-h' in argv:
        print_help(scope)
        sys.exit(0)
    settings = dict(defaults)
    problems = []
    for arg in argv:
        try:
            given = dict([from_argument(arg, script, defaults)]) if arg.startswith('--') else read_config(arg)
        except InputError as e:
            problems.append(str(e))
            continue
        for key, value in given.items():
            try:
                if key in defaults:
                    settings[key] = converted(key, value, defaults[key])
            except InputError as e:
                problems.append(str(e) if arg.startswith('--') else f'{arg}: {e}')
    if problems:
        raise InputError(', and '.join(problems))
    scope.update(settings)
    return settings


def from_argument(arg, script, defaults):
    """(key, value) of one --key=value. Raises InputError for a key that the script has not."""
    key, equals, text = arg[2:].partition('=')
    if key not in defaults:
        owner = next((s for s in SCRIPTS if key in settings_of(s)), None)
        hint = f' ({owner} has it)' if owner else did_you_mean(key, defaults)
        raise InputError(f"unknown setting '--{key}' of {script}{hint}")
    if equals:
        return key, parsed(text, defaults[key])
    if isinstance(defaults[key], (bool, type(None))):
        return key, True
    raise InputError(f'--{key} needs a value: --{key}=...')
