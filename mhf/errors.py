"""Errors and output of a script: an error that the user can fix is one line, and a closed pipe ends it silently."""

import io
import os
import sys


class InputError(ValueError):
    """An error that the user can fix, such as a wrong setting or too little text."""


class Output(io.FileIO):
    """The file of a stream whose writes never fail: what a closed pipe or terminal does not take is lost."""

    def write(self, data):
        try:
            return super().write(data)
        except OSError:
            return len(data)


def ignore_closed_output():
    """Lets a script run on when the reader of its stdout and stderr has ended."""
    for name in ('stdout', 'stderr'):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # neither a notebook's nor closed by >&-
            file = io.BufferedWriter(Output(stream.fileno(), 'w', closefd=False))
            setattr(sys, name, io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True))


def install_excepthook():
    """
    Prepares a script's output: an uncaught InputError or OSError prints one line (MHF_TRACEBACK=1: its traceback), each
    line is written at once, and stdout replaces a character that its encoding lacks by a question mark. configure()
    calls it, and so do modules that run with -m.
    """
    sys.excepthook = print_error
    if isinstance(sys.stdout, io.TextIOWrapper):  # neither a notebook's nor closed by >&-
        sys.stdout.reconfigure(errors='replace', line_buffering=True)


def print_error(error_class, error, traceback):
    if issubclass(error_class, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest at its end
    elif issubclass(error_class, InputError | OSError) and not os.environ.get('MHF_TRACEBACK'):
        print('error:', *str(error).splitlines(), file=sys.stderr)
    else:
        sys.__excepthook__(error_class, error, traceback)
