"""
The settings of a script: its own defaults, then config files, then --key=value on the command line.

    $ python train.py config/mhf_tiny.py --max_steps=100 --wandb

A script's settings are the lower-case `name = expression` lines between its imports and its line

    config = configure(globals())     # overrides what stands above; an imported script keeps its defaults

Config files are Python and run as such; what they assign must be a setting of some script here, so one file serves all.
A variant begins with `from config.mhf_1b import *`. Names that begin with _ are the file's own. Every unknown name,
missing value or wrong type is refused, all of them at once. Bad input of any kind is an InputError.
"""

import ast
import difflib
import functools
import sys
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


@functools.cache
def declared(script):
    """{name: default} of the settings of a script of this repository. Raises InputError at a line that is none."""
    _docstring, *body = ast.parse((HERE / script).read_text(encoding='utf-8')).body
    end = next(k for k, node in enumerate(body) if ast.unparse(node).startswith('config = configure('))
    settings = {}
    for node in body[:end]:
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not settings:
            continue
        where = f'{script}, line {node.lineno}'
        name = ' '.join(map(ast.unparse, node.targets)) if isinstance(node, ast.Assign) else ''
        if not (name.isidentifier() and name.islower()):
            raise InputError(f'{where}: no lower-case `name = expression`; it belongs after configure(globals())')
        try:
            settings[name] = eval(ast.unparse(node.value), dict(settings))
        except Exception as e:
            raise InputError(f'{where}: {name}: {type(e).__name__}: {e}') from None
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
    known = {k: v for script in SCRIPTS for k, v in declared(script).items()}
    assigned = {k: v for k, v in scope.items() if k[0] != '_' and not isinstance(v, types.ModuleType)}
    settings, problems = {}, []
    for key, value in assigned.items():
        try:
            if key not in known:
                raise InputError(f"unknown setting '{key}'{did_you_mean(key, known)}")
            settings[key] = converted(key, value, known[key])
        except InputError as e:
            problems.append(str(e))
    if problems:
        raise InputError(f'{path}: {", and ".join(problems)}')
    return settings


def configure(scope):
    """
    Overrides the settings of the script whose globals are `scope` from the command line; returns them all as a dict.
    A script that is imported keeps its defaults. Raises InputError with every problem in it.
    """
    script = Path(scope['__file__']).name
    mine = declared(script)
    argv = sys.argv[1:] if scope['__name__'] == '__main__' else []
    if '--help' in argv or '-h' in argv:
        print(scope['__doc__'].strip(), '\n\nsettings:', *(f'\n  --{k}={v!r}' for k, v in mine.items()), sep='')
        sys.exit(0)
    settings, problems = dict(mine), []
    for arg in argv:
        try:
            if not arg.startswith('--'):
                settings |= {k: v for k, v in read_config(arg).items() if k in mine}
                continue
            key, equals, text = arg[2:].partition('=')
            if key not in mine:
                owner = next((s for s in SCRIPTS if key in declared(s)), None)
                hint = f' ({owner} has it)' if owner else did_you_mean(key, mine)
                raise InputError(f"unknown setting '--{key}' of {script}{hint}")
            if not equals and not isinstance(mine[key], (bool, type(None))):
                raise InputError(f'--{key} needs a value: --{key}=...')
            settings[key] = converted(key, parsed(text, mine[key]) if equals else True, mine[key])
        except InputError as e:
            problems.append(str(e))
    if problems:
        raise InputError(', and '.join(problems))
    scope.update(settings)
    return settings
