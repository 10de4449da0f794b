"""
The settings of a script: its own defaults, then config files, then --key=value on the command line.

    $ python train.py config/mhf_tiny.py --max_steps=100 --wandb

A script's settings are its lower-case globals that are numbers, strings, True, False or None when it calls

    config = configure(globals())     # sets these globals anew; an imported script keeps its defaults

Config files are Python and run as such. They may assign the settings of all scripts here, so one file serves all; names
that begin with _ are the file's own. A variant of a config begins with `from config.mhf_1b import *`. Unknown names,
missing values and wrong types are refused, all of them at once. Bad input of any kind is an InputError.
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


class InputError(ValueError):
    """A mistake in the user's input. It ends a script with one line, `error: ...`, and exit code 1."""

    def __init__(self, message):
        super().__init__(' '.join(str(message).splitlines()))


def install_excepthook():
    """Makes an uncaught InputError print its message alone, without a traceback. Modules run with -m call it."""

    def excepthook(error_class, error, traceback):
        if isinstance(error, InputError):
            print(f'error: {error}', file=sys.stderr)
        else:
            sys.__excepthook__(error_class, error, traceback)

    sys.excepthook = excepthook


def did_you_mean(word, known):
    """'; did you mean X?' for the known word nearest to `word`, or ''."""
    near = difflib.get_close_matches(str(word), [str(k) for k in known], n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ''


def check_numbers(settings, above_zero='', not_negative='', below=None):
    """
    Raises InputError where a setting is outside its range. above_zero and not_negative are names, separated by spaces;
    below is {name: limit} of settings from 0 to below a limit.
    """
    for name in above_zero.split():
        if not 0 < settings[name] < math.inf:
            raise InputError(f'{name}={settings[name]}: must be above 0')
    for name in not_negative.split():
        if not 0 <= settings[name] < math.inf:
            raise InputError(f'{name}={settings[name]}: must not be negative')
    for name, limit in (below or {}).items():
        if not 0 <= settings[name] < limit:
            raise InputError(f'{name}={settings[name]}: must be from 0 to below {limit}')


def head_of(script):
    """The lines `name = value` of a script's settings, with their comments: all down to its configure(globals())."""
    above, _, _ = (HERE / script).read_text(encoding='utf-8').partition('\nconfig = configure(')
    first = re.search(r'^(#.*\n)*[a-z]\w* = ', above, re.MULTILINE)
    return above[first.start() :]


@functools.cache
def settings_of(script):
    """{name: default} of a script's settings, without running the rest of the script."""
    settings = {}
    exec(head_of(script), {}, settings)
    return settings


def converted(key, value, default):
    """`value` as the type of `default`, or InputError. A default of None takes anything: the script checks it."""
    if default is None or type(value) is type(default):
        return value
    # 1 for 1.0, or 1e5 for 100000
    if type(default) is float and type(value) is int and abs(value) < 1e308:
        return float(value)
    if type(default) is int and type(value) is float and value.is_integer():
        return int(value)
    raise InputError(f'{key}={value!r} is {type(value).__name__}, expected {type(default).__name__} (like {default!r})')


def parsed(text, default):
    """The value of --key=text: the text itself if the default is one, else a Python literal, else the text."""
    if isinstance(default, str):
        return text
    literal = {'true': 'True', 'false': 'False', 'none': 'None'}.get(text, text)
    try:
        return ast.literal_eval(literal)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def read_config(path):
    """The settings that the config file `path` makes, checked. Raises InputError with every problem in it."""
    here = HERE / path
    file = Path(path) if Path(path).is_file() else here
    if not file.is_file():
        near = did_you_mean(path, [config.relative_to(HERE) for config in HERE.glob('config/*.py')])
        raise InputError(f"no config file '{path}'{near} (settings are given as --key=value)")
    scope = {'__file__': str(file)}
    try:
        exec(compile(file.read_text(encoding='utf-8'), str(file), 'exec'), scope)
    # whatever the file's own code raises
    except Exception as e:
        lines = [frame.lineno for frame in traceback.extract_tb(e.__traceback__) if frame.filename == str(file)]
        line = lines[-1] if lines else getattr(e, 'lineno', None)
        raise InputError(f'{path}, line {line}: {type(e).__name__}: {" ".join(str(e).split())}') from None
    known = {name for script in SCRIPTS for name in settings_of(script)}
    settings = {}
    unknown = []
    for key, value in scope.items():
        if key.startswith('_') or isinstance(value, types.ModuleType):
            continue
        settings[key] = value
        if key not in known:
            unknown.append(f"unknown setting '{key}'{did_you_mean(key, known)}")
    if unknown:
        raise InputError(f'{path}: {", and ".join(unknown)}')
    return settings


def print_help(scope):
    """Prints a script's docstring and its settings: a comment above settings begins a group of them."""
    settings = re.sub(r'^(\w+) = ', r'--\1=', head_of(Path(scope['__file__']).name), flags=re.MULTILINE)
    groups = re.sub(r'^((#.*\n)+)', r'\n\1', settings, flags=re.MULTILINE)
    print(scope['__doc__'].strip())
    print('\nsettings:\n')
    print(textwrap.indent(groups.lstrip('\n'), '  '))


def configure(scope):
    """
    Overrides the settings among the globals `scope` of a script from the command line; returns them all as a dict. A
    script that is imported keeps its defaults. Raises InputError with every problem.
    """
    script = Path(scope['__file__']).name
    types_of_settings = (bool, int, float, str, type(None))
    defaults = {}
    for key, value in scope.items():
        if key.islower() and not key.startswith('_') and isinstance(value, types_of_settings):
            defaults[key] = value
    argv = []
    if scope['__name__'] == '__main__':
        argv = sys.argv[1:]
        install_excepthook()
    if '--help' in argv or '-h' in argv:
        print_help(scope)
        sys.exit(0)
    settings = dict(defaults)
    problems = []
    for arg in argv:
        is_setting = arg.startswith('--')
        try:
            given = from_argument(arg, script, defaults) if is_setting else read_config(arg)
        except InputError as e:
            problems.append(str(e))
            continue
        for key, value in given.items():
            # a config file also has the settings of other scripts
            if key not in defaults:
                continue
            try:
                settings[key] = converted(key, value, defaults[key])
            except InputError as e:
                problems.append(str(e) if is_setting else f'{arg}: {e}')
    if problems:
        raise InputError(', and '.join(problems))
    scope.update(settings)
    return settings


def from_argument(arg, script, defaults):
    """{key: value} of one --key=value. Raises InputError for a key that the script has not."""
    key, equals, text = arg[2:].partition('=')
    if key not in defaults:
        hint = did_you_mean(key, defaults)
        for other in SCRIPTS:
            if key in settings_of(other):
                hint = f' ({other} has it)'
                break
        raise InputError(f"unknown setting '--{key}' of {script}{hint}")
    if equals:
        return {key: parsed(text, defaults[key])}
    if isinstance(defaults[key], (bool, type(None))):
        return {key: True}
    raise InputError(f'--{key} needs a value: --{key}=...')
