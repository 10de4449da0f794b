"""
The first page of RESULTS.md: five sentences, then the answers to the questions of ABOUT.

A list's SENTENCES are templates: {0.word} is `ahead of`, `behind` or `level with`, by the same verdict() that decides
whether a claim holds. Under each question stand the claims of the lists that name it, first those that the runs decide.
No line of the page is decided by hand.
"""

import csv
import os
import statistics
from typing import NamedTuple

from configurator import InputError
from study.rows import best_rows, parameters, values

MISSING = '–'
# the questions of the first page, in their order; a claim names one of them as `about`
ABOUT = dict(
    loss='What the exact loss gives',
    standard='Where MultiHashFormer is ahead of Standard, level with it, behind it',
    parts='What each part of the method earns',
    optimizer="What the optimizer's settings and a louder beginning give",
    vocabulary='What a larger vocabulary costs',
    time='What it costs in time',
    other='Other claims',
)
HOLDS = 'Holds'
FAILS = 'Does not hold'
TOO_SMALL = 'Too small to tell'
ONE_SEED = 'One seed'
NOT_RUN = 'Not run'
DECIDED = (HOLDS, FAILS)
OPEN = (TOO_SMALL, ONE_SEED, NOT_RUN)
# what a sentence says of two models
WORDS = {HOLDS: 'ahead of', FAILS: 'behind', TOO_SMALL: 'level with', NOT_RUN: 'not yet compared with'}
INTRODUCTION = """# Results

Standard is a small decoder with an embedding matrix. H4 is MultiHashFormer: the same decoder, but it reads and predicts
four hash IDs a token in place of the token. Each was trained from scratch and is measured on text held out of training.
"""
IN_SHORT = """## In short

In brackets: by how many nats a token the model that is named first is better, with a minus where it is worse, ± from
seed to seed. Two models are level where that is less than twice the deviation.
"""
HOW_TO_READ = """## Every claim

A figure on this page says by how many nats a token the model that a claim names first is better: the difference of the
means over the seeds ± the standard deviation of that difference from seed to seed, and in brackets the seeds of both
models. A claim **holds** where the difference is as large as the claim says and larger than two standard deviations. It
**does not hold** where the difference falls short of the claim by more than two. The rest is open: where it is too
small to tell, the models are level as far as these seeds show, and one seed decides nothing.
"""


def number(numbers, form):
    """The mean of some values, and if there are several their standard deviation."""
    if not numbers:
        return MISSING
    mean = f'{statistics.mean(numbers):{form}}'
    if len(numbers) == 1:
        return mean
    return f'{mean} ± {statistics.stdev(numbers):{form}}'


def title_and_text(docstring):
    title, _, text = docstring.strip().partition('\n')
    return title.rstrip('.'), text.strip('\n')


def costs_by_device(path):
    """{device: {model: row}} of costs.csv, or {}."""
    devices = {}
    if path.exists():
        with open(path, newline='') as f:
            for row in csv.DictReader(f):
                device = row['device']
                if device == 'cpu':
                    device = 'a CPU with 1 thread' if row['threads'] == '1' else f'a CPU with {row["threads"]} threads'
                devices.setdefault(device, {})[row['model']] = row
    return devices


def verdict(better, than, by):
    """The nats of two models, a number for each seed -> whether `better` has fewer by `by` or more, and by how many."""
    if not better or not than:
        return NOT_RUN, MISSING
    difference = statistics.mean(than) - statistics.mean(better)
    if len(better) == 1 or len(than) == 1:
        return ONE_SEED, f'{difference:+.3f}'
    deviation = (statistics.variance(better) + statistics.variance(than)) ** 0.5
    figure = f'{difference:+.3f} ± {deviation:.3f}'
    if difference >= by and difference > 2 * deviation:
        return HOLDS, figure
    if by - difference > 2 * deviation:
        return FAILS, figure
    return TOO_SMALL, figure


def both_models(study, claim, group):
    """The two entries that a claim compares in a group. Its `than_group` is another group for the second one."""
    wanted = (claim['better'], group), (claim['than'], claim.get('than_group', group))
    entries = {(entry['name'], entry['group']): entry for entry in study.entries}
    return [entries[name] for name in wanted]


def measured(study, claim, group, rows):
    """The nats, or what else a claim is about, of its two models in a group: a list of numbers each, one a seed."""
    numbers = []
    for entry in both_models(study, claim, group):
        text = claim.get('on', study.first_text(entry))
        column = f'{text}_{claim.get("measure", "nats_per_token")}'
        numbers.append(values(best_rows(study, entry, rows), column))
    return numbers


def verdicts(study, claim, rows):
    """{verdict: figures} of a claim, a figure for each group that has its two models."""
    figures = {}
    for group, entries in study.groups.items():
        if {claim['better'], claim['than']} <= {entry['name'] for entry in entries}:
            better, than = measured(study, claim, group, rows)
            answer, figure = verdict(better, than, claim.get('by', 0))
            figures.setdefault(answer, []).append(f'{group} {figure} ({len(better)}+{len(than)})')
    return figures


class Comparison(NamedTuple):
    """What a sentence says of two models: {0.word}, {0.figure}, {0.sizes[0]} and {0.sizes[1]}."""

    word: str
    figure: str
    sizes: list


def comparison(study, claim, rows):
    """A claim that names its group -> Comparison. The word is `ahead of` where the first model has fewer nats."""
    answer, figure = verdict(*measured(study, claim, claim['group'], rows), 0)
    if answer == ONE_SEED:
        answer = FAILS if figure.startswith('-') else HOLDS
        figure += ', one seed'
    sizes = []
    for entry in both_models(study, claim, claim['group']):
        seed_rows = best_rows(study, entry, rows)
        sizes.append(f'{parameters(seed_rows[0]) / 1e6:.1f} M' if seed_rows else MISSING)
    return Comparison(WORDS[answer], figure, sizes)


def sentences(study, rows):
    """A list's SENTENCES with the figures of its rows."""
    said = {}
    for about, (template, claims) in study.sentences.items():
        compared = [comparison(study, claim, rows) for claim in claims]
        said[about] = template.format(*compared, time=time_of_a_step(study))
    return said


def temperatures(study, rows):
    """A sentence for each model whose best temperature is known: details.py measures it for the paper's loss."""
    lines = []
    for entry in study.entries:
        seed_rows = best_rows(study, entry, rows)
        temperature = values(seed_rows, 'temperature')
        if temperature:
            without = number(values(seed_rows, 'nats_without'), '.3f')
            with_it = number(values(seed_rows, 'nats_at_it'), '.3f')
            best = number(temperature, '.2f')
            lines.append(
                f"The paper's loss ({entry['name']}, {entry['group']}): {without} nats, and {with_it} at its best "
                f'temperature, {best}, which is chosen on one half of the text and measured on the other.'
            )
    return lines


def vocabularies(study, rows):
    """A sentence for each model that the smallest and the largest vocabulary have: what the larger one changes."""
    lines = []
    if not study.vocabularies:
        return lines
    groups = study.groups
    smallest = min(study.vocabularies, key=study.vocabularies.get)
    largest = max(study.vocabularies, key=study.vocabularies.get)
    with_largest = {entry['name']: entry for entry in groups[largest]}
    for entry in groups[smallest]:
        name = entry['name']
        if name not in with_largest:
            continue
        before = best_rows(study, entry, rows)
        after = best_rows(study, with_largest[name], rows)
        if not before or not after:
            continue
        tokens = [f'{study.vocabularies[group]:,} ({group})' for group in (smallest, largest)]
        sizes = [f'{parameters(seed_rows[0]) / 1e6:.2f} M' for seed_rows in (before, after)]
        line = f'{name} from {tokens[0]} to {tokens[1]} tokens: from {sizes[0]} to {sizes[1]} parameters'
        for text in entry['texts']:
            bits = [number(values(seed_rows, f'{text}_bits_per_byte'), '.4f') for seed_rows in (before, after)]
            line += f', from {bits[0]} to {bits[1]} bits per byte of {text}'
        lines.append(line + '.')
    return lines


def times(study):
    """A sentence for each main model in costs.csv: the time of its training step on each device."""
    lines = []
    devices = costs_by_device(study.path.with_name('costs.csv'))
    for name in study.main or ():
        ratios = []
        for device, device_rows in devices.items():
            first = next(iter(device_rows))
            if name in device_rows and name != first:
                ratios.append(f"{device_rows[name]['time / the first']} times {first}'s on {device}")
        if ratios:
            lines.append(f'The time of a training step of {name} is {", ".join(ratios)}.')
    return lines


def time_of_a_step(study):
    """A training step of the second main model, as times of the first one's: a range over the devices of costs.csv."""
    first, second = study.main[:2] if study.main else (None, None)
    ratios = []
    for device_rows in costs_by_device(study.path.with_name('costs.csv')).values():
        if first in device_rows and second in device_rows:
            ratios.append(float(device_rows[second]['time / the first']))
    return f'{min(ratios):.1f} to {max(ratios):.1f}' if ratios else MISSING


def to_be_run(study):
    """A sentence for a list without rows."""
    title, _ = title_and_text(study.doc)
    return f'{title}: yet to be run, by `python -m study.sweep {os.path.relpath(study.path)}`.'


def check(study):
    """Raises InputError where a claim, a sentence or MAIN names no entry, or no question of ABOUT."""
    named = {*(study.main or ()), *study.over_tokens.get('models', ())}
    sentence_claims = [claim | dict(about=about) for about, (_, claims) in study.sentences.items() for claim in claims]
    for claim in study.claims + sentence_claims:
        named |= {claim['better'], claim['than']}
        about = claim['about']
        if about not in ABOUT:
            raise InputError(f'{study.path}: about={about!r} of a claim: must be one of {", ".join(ABOUT)}')
    if unknown := named - {entry['name'] for entry in study.entries}:
        raise InputError(f'{study.path}: no entry has the name {sorted(unknown)[0]!r}, which a claim or MAIN has')
    for claim in sentence_claims:
        try:
            both_models(study, claim, claim['group'])
        except KeyError as error:
            raise InputError(f'{study.path}: no {error} among the entries, or none in {claim} of SENTENCES') from None


def first_page(studies):
    """Each question of ABOUT: what holds, what does not, what else was measured, and what is open."""
    short = {}
    facts = {about: [] for about in ABOUT}
    claims = {about: {answer: [] for answer in (*DECIDED, *OPEN)} for about in ABOUT}
    for study in studies:
        rows = study.rows()
        if not rows:
            facts['standard'].append(to_be_run(study))
            continue
        short |= sentences(study, rows)
        facts['loss'] += temperatures(study, rows)
        facts['vocabulary'] += vocabularies(study, rows)
        facts['time'] += times(study)
        for claim in study.claims:
            for answer, figures in verdicts(study, claim, rows).items():
                claims[claim['about']][answer].append(f'{claim["says"]}: {"; ".join(figures)}.')
    parts = [INTRODUCTION]
    if short:
        in_order = [short[about] for about in ABOUT if about in short]
        parts += [IN_SHORT, '\n'.join(f'{i}. {sentence}' for i, sentence in enumerate(in_order, 1)) + '\n']
    parts.append(HOW_TO_READ)
    for about, heading in ABOUT.items():
        lines = [f'* **{answer}**: {line}' for answer in DECIDED for line in claims[about][answer]]
        lines += [f'* {line}' for line in facts[about]]
        for answer in OPEN:
            if claims[about][answer]:
                lines.append(f'* Open, {answer.lower()}: {" ".join(claims[about][answer])}')
        if lines:
            parts += [f'## {heading}\n', '\n'.join(lines) + '\n']
    return parts
