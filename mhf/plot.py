"""
Pictures, by matplotlib, and the log that they are made of: train.py draws its loss.
"""

import contextlib
import json
from pathlib import Path

# what log.jsonl calls a curve -> its label, its style
CURVES = {
    'loss': ('training loss', dict(lw=0.8, alpha=0.6)),
    'val_loss': ('validation: training loss', dict(marker='o')),
    'val_nats': ('validation: -log P(w)', dict(marker='o')),
}


def figure(width, height):
    """matplotlib's figure and axes, which need no screen."""
    # imported here: few who import this module draw
    from matplotlib.figure import Figure

    fig = Figure(figsize=(width, height))
    return fig, fig.add_subplot()


def save(fig, ax, path, **labels):
    ax.set(**labels)
    ax.legend()
    fig.savefig(path, dpi=120, bbox_inches='tight')


def read_log(path):
    """The events of a log.jsonl, a list of dicts; lines that are none, like one that a crash left, are dropped."""
    events = []
    for line in Path(path).read_text(errors='replace').splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and isinstance(event.get('step'), int):
                events.append(event)
    return events


def loss_curve(events, title, path):
    """
    Losses against tokens, from the lines of a log.jsonl: dicts with step and tokens, and loss, val_loss or val_nats.
    Of a step that occurs twice, because a resumed run made it again, the last line counts.
    """
    curves = {name: {e['step']: (e['tokens'], e[name]) for e in events if name in e} for name in CURVES}
    # the training loss is -log P(w): one curve
    if curves['val_loss'] == curves['val_nats']:
        del curves['val_loss']
    fig, ax = figure(8, 5)
    for name, points in curves.items():
        if points:
            label, style = CURVES[name]
            ax.plot(*zip(*sorted(points.values()), strict=True), label=label, **style)
    ax.grid(alpha=0.3)
    save(fig, ax, path, xlabel='tokens', ylabel='nats per token', title=title)
