"""
Nats per token by token frequency, and at the best temperature, of the finished runs of a list.

    $ python -m study.tenths study/large_vocabulary.py    # adds a row per run and corpus to study/tenths.csv

A corpus is divided into ten equal parts by the counts of its tokens in the run's training data, frequent tokens first.
Models with the product loss are also measured at another temperature of P(w), the best one on the list's first corpus:
-log P(w) alone punishes probabilities that they do not train. Contexts do not overlap, so losses are higher than
those of eval.py. Needs the checkpoints that sweep.py leaves in out/.
"""

import argparse
import importlib

import numpy as np
import torch

from mhf.checkpoint import read_file
from mhf.data import Bins, count_tokens
from mhf.errors import install_excepthook
from mhf.runtime import pick_device
from mhf.tokenizers import get_tokenizer
from model import MHF
from study.rows import commit, read_csv, write_csv
from study.sweep import REPO, Study

TEMPERATURES = tuple(k / 10 for k in range(5, 51))


@torch.no_grad()
def token_nats(model, ids, temperatures=(1.0,)):
    """Token ids (n + 1,) -> -log P of all but the first at each temperature, (temperatures, n) float64."""
    T = model.config.block_size
    device = model.embed.weight.device
    nats = []
    for start in range(0, len(ids) - 1, T):
        sequence = torch.tensor(ids[start : start + T + 1], device=device)
        logp = model.log_probs(sequence[None, :-1])[0]  # (T, V)
        targets = [(logp / t).log_softmax(-1).gather(1, sequence[1:, None])[:, 0] for t in temperatures]
        nats.append(-torch.stack(targets).double().cpu())
    return torch.cat(nats, dim=1).numpy()


def tenths(nats, counts):
    """-log P (n,) and the counts of the targets (n,) -> columns with their means in each tenth."""
    parts = np.array_split(np.argsort(-counts, kind='stable'), 10)
    columns = {f'count_{k}': f'{counts[part].mean():.1f}' for k, part in enumerate(parts, 1)}
    return columns | {f'nats_{k}': f'{nats[part].mean():.4f}' for k, part in enumerate(parts, 1)}


def measure(study, entry, folder):
    """The columns of a run for each of its corpora, {corpus: dict}."""
    ckpt = read_file(folder / 'ckpt.pt')
    config = ckpt.model_config
    edited = importlib.import_module(entry.get('edit', 'model'))
    model = getattr(edited, 'MHF', MHF)(config, **ckpt.vocabulary)
    model.load_state_dict(ckpt.model)
    model.eval().to(pick_device(None))
    tok = get_tokenizer(study.data[entry['train']].get('tokenizer', 'mistral'))
    counts = count_tokens(Bins(entry['train'], 'train', tok))
    temperatures = TEMPERATURES if config.loss == 'product' and config.num_hashes else (1.0,)
    best = None
    found = {}
    for corpus, path in entry['corpora'].items():
        val = Bins(path, 'val', tok)
        ids = val[:].tolist()
        with torch.autocast(pick_device(None), torch.bfloat16, enabled=ckpt.settings['dtype'] == 'bfloat16'):
            nats = token_nats(model, ids, temperatures)
        means = nats.mean(axis=1)
        best = means.argmin() if best is None else best  # on the first corpus, which the run validates on
        unscaled = temperatures.index(1.0)
        found[corpus] = dict(nats_per_token=means[unscaled], temperature=temperatures[best], nats_at_it=means[best])
        found[corpus] |= tenths(nats[unscaled], counts[ids[1:]])
    return found


def main():
    install_excepthook()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('list', help='a list of runs, like study/large_vocabulary.py')
    study = Study(parser.parse_args().list)
    path = REPO / 'study/tenths.csv'
    finished = study.rows()
    for entry in study.entries:
        for row in study.best_rows(entry, finished):
            folder = study.folder(study.key(entry, float(row['learning_rate']), row['seed']))
            model = dict(list=study.path.stem, group=entry['group'], model=entry['label'])
            run = model | dict(seed=row['seed'])
            # a row may be the mean of several seeds: 1+2
            is_known = any(row['seed'] in r['seed'].split('+') and model.items() <= r.items() for r in read_csv(path))
            if not is_known and (folder / 'ckpt.pt').exists():
                measured = measure(study, entry, folder)
                rows = [run | dict(commit=commit(), corpus=corpus) | columns for corpus, columns in measured.items()]
                write_csv(path, [*read_csv(path), *rows])
                print(', '.join(run.values()), flush=True)


if __name__ == '__main__':
    main()
