"""The pictures of RESULTS.md, from the rows of a study alone: the same rows give the same bytes."""

import json
import statistics

from matplotlib.figure import Figure

from study.rows import best_rows, learning_rate_nats, parameters, values

# a model that is farther than this many nats from the best one is written at the edge
FAR = 0.8


def spread(numbers):
    return statistics.stdev(numbers) if len(numbers) > 1 else 0


def save_axes(fig, ax, path, **labels):
    """Saves a figure of one axes with a legend."""
    ax.set(**labels)
    ax.legend()
    fig.savefig(path, dpi=120, bbox_inches='tight')


def save(fig, path):
    fig.tight_layout()
    # without matplotlib's version, so that the bytes do not depend on it
    fig.savefig(path, dpi=110, metadata=dict(Software=None))


def draw_models(ax, by_name, edge):
    """Points with deviations: {name: nats of its seeds}, the first name at the top."""
    for place, nats in enumerate(reversed(by_name.values())):
        mean = statistics.mean(nats)
        if mean > edge:
            ax.text(edge, place, f'{mean:.2f} \N{RIGHTWARDS ARROW}', ha='right', va='center')
        else:
            ax.errorbar(mean, place, xerr=spread(nats), fmt='o', capsize=3, color='C0')
    ax.set_yticks(range(len(by_name)), list(reversed(by_name)))
    ax.set_ylim(-0.5, max(1, len(by_name)) - 0.5)


def draw_rates(ax, by_name, edge):
    """Curves of {name: {rate: nats of the first seed}}."""
    rates = sorted({rate for curve in by_name.values() for rate in curve})
    for k, (name, curve) in enumerate(by_name.items()):
        if curve and min(curve.values()) < edge:
            tried = sorted(curve)
            nats = [curve[rate] for rate in tried]
            style = '-' if k < 10 else '--'
            ax.plot(tried, nats, marker='o', color=f'C{k % 10}', linestyle=style, label=name)
            ax.legend(fontsize=8, loc='upper left', bbox_to_anchor=(1, 1))
    ax.set(title='the first seed', xlabel='learning rate', ylabel='nats per token', xscale='log')
    ax.set_xticks(rates, [f'{rate:g}' for rate in rates])
    ax.minorticks_off()


def draw(study, rows, path):
    """A row a group: the nats of each finished model on the left, the rates that were tried on the right."""
    nats = {}
    for group, entries in study.groups.items():
        column = f'{study.first_text(entries[0])}_nats_per_token'
        finished = {entry['name']: values(best_rows(study, entry, rows), column) for entry in entries}
        nats[group] = {name: numbers for name, numbers in finished.items() if numbers}
    heights = [max(2.8, 0.9 + 0.2 * len(by_name)) for by_name in nats.values()]
    fig = Figure(figsize=(13, sum(heights)))
    axes = fig.subplots(len(study.groups), 2, squeeze=False, height_ratios=heights)
    for (group, by_name), (left, right) in zip(nats.items(), axes, strict=True):
        edge = min(map(statistics.mean, by_name.values()), default=0) + FAR
        draw_models(left, by_name, edge)
        left.set(title=group, xlabel=f'nats per token, {study.first_text(study.groups[group][0])}')
        draw_rates(right, learning_rate_nats(study, study.groups[group], rows), edge)
        left.grid(alpha=0.3)
        right.grid(alpha=0.3)
    save(fig, path)


def draw_over_tokens(study, rows, path):
    """Nats against the tokens of training, of the models and groups that the list calls OVER_TOKENS."""
    fig = Figure(figsize=(7, 3.8))
    ax = fig.subplots()
    for k, name in enumerate(study.over_tokens['models']):
        points = []
        for group in study.over_tokens['groups']:
            for entry in study.groups[group]:
                seed_rows = best_rows(study, entry, rows) if entry['name'] == name else []
                if seed_rows:
                    settings = json.loads(seed_rows[0]['settings'])
                    tokens = settings['max_steps'] * settings['batch_size'] * settings['block_size']
                    nats = values(seed_rows, f'{study.first_text(entry)}_nats_per_token')
                    points.append((tokens / 1e6, statistics.mean(nats), spread(nats)))
        if points:
            millions, nats, deviations = zip(*sorted(points), strict=True)
            ax.errorbar(millions, nats, yerr=deviations, marker='o', capsize=3, color=f'C{k}', label=name)
    ax.set(xlabel='tokens of training, millions', ylabel=f'nats per token, {study.first_text(study.entries[0])}')
    ax.grid(alpha=0.3)
    ax.legend()
    save(fig, path)


def draw_vocabularies(study, rows, path):
    """
    Bits per byte, and parameters, against the vocabulary. Each group is a tokenizer; the list says how many tokens it
    has.
    """
    fig = Figure(figsize=(9, 3.4))
    left, right = fig.subplots(1, 2)
    text = study.first_text(study.entries[0])
    for k, name in enumerate(dict.fromkeys(entry['name'] for entry in study.entries)):
        points = []
        for entry in study.entries:
            if entry['name'] != name:
                continue
            seed_rows = best_rows(study, entry, rows)
            bits = values(seed_rows, f'{text}_bits_per_byte')
            if bits:
                tokens = study.vocabularies[entry['group']]
                # a little to the right for each model, so that none hides another
                place = tokens * (1 + 0.025 * k)
                points.append((place, statistics.mean(bits), spread(bits), parameters(seed_rows[0]) / 1e6))
        if points:
            places, bits, deviations, millions = zip(*sorted(points), strict=True)
            left.errorbar(places, bits, yerr=deviations, marker='o', capsize=3, color=f'C{k}', label=name)
            right.plot(places, millions, marker='o', color=f'C{k}', label=name)
    for ax, label in ((left, f'bits per byte of held-out {text}'), (right, 'parameters, millions')):
        ax.set(xscale='log', xlabel='tokens in the vocabulary', ylabel=label)
        ax.set_xticks(list(study.vocabularies.values()), [f'{n // 1000} K' for n in study.vocabularies.values()])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    right.set_ylim(bottom=0)
    right.legend(fontsize=8, loc='upper left')
    save(fig, path)
