"""
Settings of a script: its defaults, overridden by config files, overridden by --key=value on the command line.

    $ python train.py config/mhf_tiny.py --max_steps=100 --wandb

A script's settings are its lower-case globals that are numbers, strings, True, False or None when it calls

    config = configure(globals())     # sets these globals; an imported script keeps its defaults

Config files are Python. One file may contain settings of all scripts; names that start with _ are private to it. A
variant of a config starts with `from config.mhf_1b import *`. Unknown names, missing values and wrong types are errors.
"""

import ast
import atexit
import difflib
import functools
import io
import math
import os
import re
import sys
import textwrap
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = ('prepare.py', 'train.py', 'sample.py', 'bench.py', 'eval.py', 'expand.py')


class InputError(ValueError):
    """An error that the user can fix, such as a wrong setting or a full disk: one line `error: ...` and exit code 1."""

    def __init__(self, message):
        super().__init__(' '.join(str(message).splitlines()))


class RankError(InputError):
    """An InputError of one rank alone, such as its device or connection. Rank 0 of each machine prints the others."""


def install_excepthook():
    """
    Prepares a script's input and output: an uncaught InputError or Ctrl-C prints one line, a closed pipe (`| head -1`)
    ends the script silently, stdout writes each line at once, and a character that its encoding lacks becomes a
    question mark. configure() calls it, and so do modules that run with -m. Raises InputError for an argument that is
    not valid text.
    """
    for name in ('stdout', 'stderr'):
        if getattr(sys, name) is None:  # closed in the shell by >&-
            setattr(sys, name, open(os.devnull, 'w'))
    if isinstance(sys.stdout, io.TextIOWrapper):  # a notebook has another class
        sys.stdout.reconfigure(errors='replace', line_buffering=True)
    sys.excepthook = print_error
    atexit.register(discard_closed_stdout)
    for argument in sys.argv[1:]:
        if re.search('[\ud800-\udfff]', argument):
            encoding = sys.getfilesystemencoding()
            raise InputError(f'argument {argument!a} is not valid {encoding}; encode it as {encoding}')


def print_error(error_class, error, traceback):
    if isinstance(error, InputError):
        if isinstance(error, RankError) or os.environ.get('LOCAL_RANK', '0') == '0':
            print(f'error: {error}', file=sys.stderr)
    elif error_class is KeyboardInterrupt:
        print('\ninterrupted', file=sys.stderr)  # Python then ends the process by SIGINT: 130 in a shell
    elif not (isinstance(error, BrokenPipeError) and discard_closed_stdout('\n')):
        sys.__excepthook__(error_class, error, traceback)


def discard_closed_stdout(text=''):
    """Writes `text` to stdout. Returns whether stdout is a closed pipe; if so, discards the rest of the output."""
    try:
        print(end=text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


class UnfailingFile(io.FileIO):
    """An output file that discards what cannot be written."""

    def write(self, data):
        try:
            return super().write(data)
        except OSError:
            return len(data)


def ignore_closed_output():
    """
    From now on, output that cannot be written is discarded: a script continues without its reader (`| head -1`), its
    terminal, or room on the disk of its output.
    """
    for name in ('stdout', 'stderr'):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # a notebook has another class
            stream.flush()
            file = io.BufferedWriter(UnfailingFile(stream.fileno(), 'w', closefd=False))
            setattr(sys, name, io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True))


def did_you_mean(word, known):
    """Returns '; did you mean X?' for the known word nearest to `word`, or ''."""
    near = difflib.get_close_matches(str(word), [str(k) for k in known], n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ''


def check_numbers(settings, names, low=0, below=math.inf, positive=False):
    """Raises InputError unless the settings `names`, "a b c", are in [low, below); `positive` excludes 0."""
    for name in names.split():
        if not low <= settings[name] < below or positive and settings[name] == 0:
            limit = f' and below {below}' if below < math.inf else ''
            raise InputError(f'{name}={settings[name]}: must be {"above" if positive else "at least"} {low}{limit}')


def settings_source(script):
    """Returns the lines `name = value` of a script's settings, with their comments."""
    above, _, _ = (HERE / script).read_text(encoding='utf-8').partition('\nconfig = configure(')
    return above[re.search(r'^(#.*\n)*[a-z]\w* = ', above, re.MULTILINE).start() :]


@functools.cache
def get_defaults(script):
    """Returns {name: default} of a script's settings, without running the rest of the script."""
    settings = {}
    exec(settings_source(script), {}, settings)
    return settings


def command_line_names():
    """Returns the set of the names in --name and --name=value on the command line."""
    return {argument[2:].partition('=')[0] for argument in sys.argv[1:] if argument.startswith('--')}


def coerce(key, value, default):
    """Returns `value` as the type of `default`, with ~ expanded in paths. A default of None accepts any type."""
    if isinstance(value, str) and isinstance(default, str | None):
        is_prompt = key == 'start'
        return value if is_prompt else ','.join(map(os.path.expanduser, value.split(',')))
    if default is None or type(value) is type(default):
        return value
    # 1 for 1.0, or 1e5 for 100000
    if type(default) is float and type(value) is int and abs(value) < 1e308:
        return float(value)
    if type(default) is int and type(value) is float and value.is_integer():
        return int(value)
    raise InputError(f'{key}={value!r} is {type(value).__name__}, expected {type(default).__name__} (like {default!r})')


def parse_flag(argument, script, defaults):
    """
    Returns {key: value} of an argument --key=value, or --key of a setting that is True or False or None. The value is a
    Python literal, or text if it is not a literal or the default is text.
    """
    key, equals, text = argument[2:].partition('=')
    if key not in defaults:
        owner = next((other for other in SCRIPTS if key in get_defaults(other)), None)
        hint = f' (it is a setting of {owner})' if owner else did_you_mean(key, defaults)
        raise InputError(f"unknown setting '--{key}' of {script}{hint}")
    if not equals and isinstance(defaults[key], bool | None):
        return {key: True}
    if not equals:
        raise InputError(f'--{key} needs a value: --{key}=...')
    if isinstance(defaults[key], str):
        return {key: text}
    try:
        return {key: ast.literal_eval({'true': 'True', 'false': 'False', 'none': 'None'}.get(text, text))}
    except (ValueError, SyntaxError):
        return {key: text}


def read_config(path):
    """Returns {name: value} of a config file. Raises InputError for its errors and for unknown names."""
    file = Path(path) if Path(path).is_file() else HERE / path
    if not file.is_file():
        near = did_you_mean(path, [config.relative_to(HERE) for config in HERE.glob('config/*.py')])
        raise InputError(f"no config file '{path}'{near} (settings are given as --key=value)")
    scope = {'__file__': str(file)}
    try:
        exec(compile(file.read_bytes(), str(file), 'exec'), scope)
    except Exception as e:  # the file may raise anything
        raise InputError(f'{path}: {type(e).__name__}: {e}') from None
    settings = {k: v for k, v in scope.items() if not (k.startswith('_') or isinstance(v, types.ModuleType))}
    known = {name for script in SCRIPTS for name in get_defaults(script)}
    for key in settings:
        if key not in known:
            raise InputError(f"{path}: unknown setting '{key}'{did_you_mean(key, known)}")
    return settings


def print_help(scope):
    """Prints a script's docstring and its settings, in their groups."""
    settings = re.sub(r'^(\w+) = ', r'--\1=', settings_source(Path(scope['__file__']).name), flags=re.MULTILINE)
    groups = re.sub(r'^((#.*\n)+)', r'\n\1', settings, flags=re.MULTILINE)
    print(f'{scope["__doc__"].strip()}\n\nsettings:\n\n{textwrap.indent(groups.lstrip(), "  ")}')


def configure(scope):
    """
    Overrides the settings among the globals `scope` of a script by config files, then by the command line. Returns all
    settings as a dict. Raises InputError.
    """
    names = [name for name in scope if name.islower() and not name.startswith('_')]
    defaults = {name: scope[name] for name in names if isinstance(scope[name], bool | int | float | str | None)}
    if scope['__name__'] != '__main__':
        return defaults
    install_excepthook()
    arguments = sys.argv[1:]
    if '--help' in arguments or '-h' in arguments:
        print_help(scope)
        sys.exit(0)
    settings = dict(defaults)
    for argument in sorted(arguments, key=lambda argument: argument.startswith('--')):  # config files first
        is_flag = argument.startswith('--')
        given = parse_flag(argument, Path(scope['__file__']).name, defaults) if is_flag else read_config(argument)
        # a config file may contain settings of other scripts
        settings |= {key: coerce(key, value, defaults[key]) for key, value in given.items() if key in defaults}
    scope.update(settings)
    return settings
