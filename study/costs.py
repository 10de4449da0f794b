"""
Cost: a training step of each variant, by bench.py, all in turn in one run

    $ python study/costs.py study/english.py     # minutes, of an idle machine; writes study/costs.csv

Of the list's first group, each shape once: one micro-batch, forward, backward, clipping, AdamW. The median of
repetitions; memory, in bytes, beyond the parameters and AdamW's moments. Nats at equal time are those of the claims
that compare with a Standard model of 1.5 times the tokens, about the least that H4's time buys.
"""

import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import report
import sweep

import bench
from checkpoint import pick_device
from configurator import InputError
from hashing import get_tokenizer
from model import MHFConfig


def variants(study, tok):
    """{name: MHFConfig} of the first group's entries."""
    found, sizes = {}, dict(vocab_size=len(tok.tokens), pad_id=tok.pad)
    for entry in study.entries:
        if entry['group'] == study.entries[0]['group']:
            settings = study.settings(entry, 0, 0)
            c = MHFConfig(**sizes | {k: v for k, v in settings.items() if k in MHFConfig.__annotations__})
            # signatures of another kind cost the same, and so do other settings of training
            if c.num_lsh == 0 and c not in found.values():
                found[entry['name']] = c
    return found, settings


def main(path):
    study, tok = sweep.Study(path), get_tokenizer('mistral')
    found, settings = variants(study, tok)
    bench.micro_batch_size, bench.block_size, bench.repeats = settings['batch_size'], settings['block_size'], 15
    bench.compile, bench.json = False, True
    machine = bench.Machine(*pick_device())
    about = machine.describe()
    rows = bench.bench_train(machine, found, tok, about)
    fields = ('parameters', 'tokens_per_s', 'flops_per_token', 'gemm_share', 'peak_memory')
    with open(study.path.with_name('costs.csv'), 'w', newline='') as f:
        writer = csv.writer(f, lineterminator='\n')
        writer.writerow(
            ['model', 'time / the first', *fields, 'device', 'dtype', 'torch', 'threads', 'gemm_flops', 'commit']
        )
        end = [about[k] for k in ('device', 'dtype', 'torch')]
        end += [bench.torch.get_num_threads(), about['gemm_flops'], report.commit()]
        for name in found:
            ratio = rows[name]['seconds'] / rows[next(iter(found))]['seconds']
            writer.writerow([name, f'{ratio:.3f}', *(rows[name][k] for k in fields), *end])
            print(f'{name}: {rows[name]["tokens_per_s"]:,.0f} tokens/s, {ratio:.2f} times the first')


if __name__ == '__main__':
    if len(sys.argv) != 2:
        raise InputError(f'{len(sys.argv) - 1} arguments: name one list of runs, like study/english.py')
    main(sys.argv[1])
