"""
A file that a crash cannot leave half written: the caller writes it beside, fsyncs it, and replace_durably gives it its
name.
"""

import os


def replace_durably(temporary, path):
    """os.replace of a file that is fsynced. Afterwards not even a crash of the machine brings the old one back."""
    os.replace(temporary, path)
    if hasattr(os, 'O_DIRECTORY'):
        folder = os.open(path.parent, os.O_DIRECTORY)
        os.fsync(folder)
        os.close(folder)
