"""
Settings of a script: its defaults, overridden by config files, overridden by --key=value on the command line.

    $ python train.py config/mhf_tiny.py --max_steps=100 --wandb

A script's settings are the lower-case globals with plain values above the call

    config = configure(globals())     # sets these globals; an imported script keeps its defaults

A new setting is one line `name = value`, with any expression for a number, a string, True, False, None or a list.
Config files are Python. One file may contain settings of all scripts; names that start with _ are private to it. A
variant of a config starts with `from config.mhf_1b import *`. Unknown names and wrong types are errors.
"""

import ast
import contextlib
import difflib
import functools
import json
import os
import re
import runpy
import sys
import types
from pathlib import Path

from mhf.errors import InputError, install_excepthook

HERE = Path(__file__).resolve().parent
CALL = '\nconfig = configure('
SCRIPTS = sorted(path.name for path in HERE.glob('[!.]*.py') if CALL.encode() in path.read_bytes())


def did_you_mean(word, known):
    """Returns '; did you mean X?' for the known word nearest to `word`, or ''."""
    near = difflib.get_close_matches(str(word), [str(k) for k in known], n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ''


def check_known(names, known, where):
    """Raises InputError for a name that is not known."""
    for name in names:
        if name not in known:
            raise InputError(f"{where}: unknown setting '{name}'{did_you_mean(name, known)}")


@functools.cache
def find_settings(script):
    """Returns {name: ast node of its assignment} of the settings in the source of a script, a path from HERE."""
    above, _, _ = (HERE / script).read_text(encoding='utf-8').partition(CALL)
    nodes = [node for node in ast.parse(above).body if isinstance(node, ast.Assign)]
    targets = {ast.unparse(node.targets[0]): node for node in nodes}
    return {name: node for name, node in targets.items() if is_setting_name(name)}


def is_setting_name(name):
    return name.isidentifier() and name.islower() and not name.startswith('_')


def coerce(key, value, default):
    """Returns `value` as the type of `default`, with ~ expanded in paths. A default of None accepts any type."""
    value = json.loads(json.dumps(value))  # what a checkpoint stores: a float for a numpy.float64
    if value == '' and default:  # an unset variable of the shell
        raise InputError(f'{key} is empty; omit --{key}, or set it (default: {default})')
    # texts, which Python would treat as True
    if default is None and isinstance(value, str) and value.lower() in ('true', 'false', 'yes', 'no', 'on', 'off'):
        raise InputError(f'{key}={value}: write True or False')
    if isinstance(value, str) and key != 'start':  # the prompt
        value = ','.join(map(os.path.expanduser, value.split(',')))
    if default is None or type(value) is type(default):
        return value
    # 1 for 1.0, or 1e5 for 100000
    if type(default) is float and type(value) is int:
        return float(value)
    if type(default) is int and type(value) is float and value.is_integer():
        return int(value)
    raise InputError(f'{key}={value!r} is {type(value).__name__}, expected {type(default).__name__} (like {default!r})')


def parse_flag(argument, script, defaults):
    """
    Returns {key: value} of an argument --key=value, or --key for True. The value is a Python literal, or text if it is
    not a literal or the default is text.
    """
    key, equals, text = argument[2:].partition('=')
    check_known([key], defaults, script)
    value = text if equals else True
    if equals and not isinstance(defaults[key], str):
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(text)
    return {key: value}


def read_config(path, defaults=()):
    """
    Returns {name: value} of a config file. Raises InputError for names that are neither in `defaults` nor settings in
    the source of a script.
    """
    if Path(path).suffix != '.py':  # a line of JSON, for example, is valid Python without settings
        raise InputError(f'{path} is not a config (*.py); write settings as --name=value')
    scope = runpy.run_path(str(path) if Path(path).is_file() else str(HERE / path))
    settings = {k: v for k, v in scope.items() if not (k.startswith('_') or isinstance(v, types.ModuleType))}
    check_known(settings, set().union(defaults, *map(find_settings, SCRIPTS)), path)
    return settings


def print_help(scope):
    """Prints a script's docstring, and its settings as they are in its source."""
    above, _, _ = Path(scope['__file__']).read_text(encoding='utf-8').partition(CALL)
    first = re.search(r'^(#.*\n)*[a-z]\w* = ', above, re.MULTILINE).start()
    print(f'{scope["__doc__"].strip()}\n\n# settings: --name=value\n\n{above[first:]}'.strip())


def configure(scope):
    """
    Overrides the settings among the globals `scope` of a script by config files, then by the command line. Returns all
    settings as a dict. Raises InputError.
    """
    plain = bool | int | float | str | list | tuple | None
    defaults = {k: v for k, v in scope.items() if is_setting_name(k) and isinstance(v, plain)}
    defaults = json.loads(json.dumps(defaults))
    if scope['__name__'] != '__main__':
        return defaults
    install_excepthook()
    arguments = sys.argv[1:]
    if '--help' in arguments or '-h' in arguments:
        print_help(scope)
        sys.exit(0)
    script = Path(scope['__file__']).name
    settings = dict(defaults)
    for argument in sorted(arguments, key=lambda argument: argument.startswith('--')):  # config files first
        is_flag = argument.startswith('--')
        given = parse_flag(argument, script, defaults) if is_flag else read_config(argument, defaults)
        # a config file may contain settings of other scripts
        settings |= {key: coerce(key, value, defaults[key]) for key, value in given.items() if key in defaults}
    scope.update(settings)
    return settings
