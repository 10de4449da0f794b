"""Errors and output of a script: an error that the user can fix is one line, and a closed pipe ends it silently."""

import io
import os
import signal
import sys
import time


class InputError(ValueError):
    """An error that the user can fix, such as a wrong setting or a full disk: one line `error: ...` and exit code 1."""

    def __init__(self, message):
        super().__init__(' '.join(str(message).splitlines()))


class Output(io.FileIO):
    """The file of stdout or stderr. A closed pipe (`| head -1`) ends the script silently, a full disk with one line."""

    ignores_errors = False  # True: the script continues, and what cannot be written is lost

    def write(self, data):
        try:
            return super().write(data)
        except OSError as e:
            if not Output.ignores_errors:
                Output.ignores_errors = True
                sys.exit(1 if isinstance(e, BrokenPipeError) else f'error: the output cannot be written ({e})')
            return len(data)


def install_excepthook():
    """
    Prepares a script's output: an uncaught InputError or Ctrl-C prints one line, each line is written at once, and
    stdout replaces a character that its encoding lacks by a question mark. configure() calls it, and so do modules that
    run with -m.
    """
    sys.excepthook = print_error
    for name, errors in (('stdout', 'replace'), ('stderr', 'backslashreplace')):
        stream = getattr(sys, name)
        if stream is None:  # closed by >&-
            setattr(sys, name, open(os.devnull, 'w'))
        elif stream is getattr(sys, f'__{name}__'):  # not a notebook's
            stream.flush()
            file = io.BufferedWriter(Output(stream.fileno(), 'w', closefd=False))
            setattr(sys, name, io.TextIOWrapper(file, stream.encoding, errors, line_buffering=True))


def print_error(error_class, error, traceback):
    if isinstance(error, InputError):
        if os.environ.get('LOCAL_RANK', '0') != '0':
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5)  # local rank 0 prints an error that all ranks have; then torchrun ends this process
        print(f'error: {error}', file=sys.stderr)
    elif error_class is KeyboardInterrupt:
        print('\ninterrupted', file=sys.stderr)  # Python then ends the process by SIGINT: 130 in a shell
    else:
        sys.__excepthook__(error_class, error, traceback)
