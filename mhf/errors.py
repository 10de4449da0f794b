"""Errors and output of a script: an error that the user can fix is one line, and a closed pipe ends it silently."""

import io
import os
import signal
import sys
import time


class InputError(ValueError):
    """An error that the user can fix, such as a wrong setting or too little text."""

    def __init__(self, message):
        super().__init__(' '.join(str(message).splitlines()))


class Output(io.FileIO):
    """The file of stdout or stderr. The first write that fails raises its OSError; what follows is lost."""

    ignores_errors = False  # True: no write raises an error

    def write(self, data):
        try:
            return super().write(data)
        except OSError:
            if not Output.ignores_errors:
                Output.ignores_errors = True
                raise
            return len(data)


def install_excepthook():
    """
    Prepares a script's output: an uncaught InputError, OSError or Ctrl-C prints one line (MHF_TRACEBACK=1: its
    traceback), each line is written at once, and stdout replaces a character that its encoding lacks by a question
    mark. configure() calls it, and so do modules that run with -m.
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
    if os.environ.get('MHF_TRACEBACK') or not issubclass(error_class, InputError | OSError | KeyboardInterrupt):
        sys.__excepthook__(error_class, error, traceback)
    elif error_class is KeyboardInterrupt:
        print('\ninterrupted', file=sys.stderr)  # Python then ends the process by SIGINT: 130 in a shell
    elif error_class is not BrokenPipeError:
        if os.environ.get('LOCAL_RANK', '0') != '0':
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5)  # local rank 0 prints an error that all ranks have; then torchrun ends this process
        print('error:', *str(error).splitlines(), file=sys.stderr)
