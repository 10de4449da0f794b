"""Functions of record.yaml: the passage, its highlights as a list, the query with each entity in its place."""

import re
import string
from collections import Counter


def process_docs(dataset):
    return dataset.map(lambda doc: {'entities': sorted(set(doc['entities'])), 'answers': sorted(set(doc['answers']))})


def doc_to_text(doc):
    text, *highlights = doc['passage'].strip().split('\n@highlight\n')
    return text + '\n\n' + ''.join(f'  - {h}.\n' for h in highlights)


def line(doc, entity):
    return f'  - {doc["query"]}'.replace('@placeholder', entity)


def doc_to_target(doc):
    return line(doc, doc['answers'][0])


def doc_to_choice(doc):
    return [line(doc, entity) for entity in doc['entities']]


def words(text):
    """As in SQuAD's evaluation: lower case, no punctuation, no articles."""
    text = ''.join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r'\b(a|an|the)\b', ' ', text).split()


def f1(prediction, gold):
    p = words(prediction)
    g = words(gold)
    if not p or not g:
        return float(p == g)
    shared = sum((Counter(p) & Counter(g)).values())
    return 2 * shared / (len(p) + len(g))


def process_results(doc, results):
    likeliest = max(range(len(results)), key=lambda k: results[k][0])
    prediction = doc['entities'][likeliest]
    return {
        'f1': max(f1(prediction, answer) for answer in doc['answers']),
        'em': max(float(words(prediction) == words(answer)) for answer in doc['answers']),
    }
