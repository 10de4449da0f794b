"""
Every picture of this repository: functions of plain data that write a .png file. train.py draws its loss, expand.py
what new tokens save, eval.py its scores.

    $ python plot.py        # draws assets/signatures.png, the picture of the README
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


def bars(labels, groups, path, ylabel, title='', fmt=None, errors=None):
    """
    For each label a bar of each group, side by side. groups is {name in the legend: values}, None for no bar;
    fmt, like '%.2f', writes the values above their bars; errors is {name of a group: the errors of its values}.
    """
    width, errors = 0.8 / len(groups), errors or {}
    fig, ax = figure(max(5, 1.2 * len(labels)), 4.5)
    for k, (name, values) in enumerate(groups.items()):
        places = [i + (k - (len(groups) - 1) / 2) * width for i in range(len(labels))]
        heights = [float('nan') if v is None else v for v in values]
        drawn = ax.bar(places, heights, width, yerr=errors.get(name), label=name)
        if fmt:
            ax.bar_label(drawn, fmt=fmt, fontsize=8)
    many = len(labels) > 5 or any(len(label) > 14 for label in labels)
    ax.set_xticks(range(len(labels)), labels, rotation=45 if many else 0, ha='right' if many else 'center')
    # room for the legend
    ax.margins(y=0.05 + 0.1 * len(groups))
    save(fig, ax, path, ylabel=ylabel, title=title)


def signatures(path):
    """What a signature is: some tokens' buckets in the paper's H4B16K."""
    from hashing import get_tokenizer, signature_table

    tok = get_tokenizer('mistral')
    table = signature_table(tok.tokens, 4, 16384, pad_id=tok.pad)
    fig, ax = figure(8, 3.4)
    for word in ('▁the', '▁The', '▁hash', 'ing', '<0x0A>'):
        row = table[tok.tokens.index(word)].tolist()
        ax.plot(range(1, 5), row, 'o-', lw=1, label=f'{word}  {row}')
    # room for the legend
    ax.set_xlim(0.8, 7.4)
    ax.set_xticks(range(1, 5))
    save(fig, ax, path, xlabel='hash function', ylabel='bucket, of 16,384', title='a token is its signature')


if __name__ == '__main__':
    signatures(Path(__file__).with_name('assets') / 'signatures.png')
