"""
Cost: time and memory of a training step of each variant

    $ python study/costs.py study/english.py     # minutes, of an idle machine; writes study/costs.csv

The models are those of the list's first group, each shape once, measured in turn by bench.py: forward, backward,
clipping and AdamW on one micro-batch. Time is the median of 15 repetitions, in times the first model's; memory is what
a step needs beyond the parameters and AdamW's moments. Each device and number of threads is a column, whose commit the
CSV names. On a GPU steps as small as these are mostly launches of kernels.
"""

import argparse
import csv
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sweep
from rows import commit

import bench
from mhf.device import pick_device, pick_dtype
from mhf.files import replace_durably
from mhf.tokenizers import get_tokenizer
from model import MHFConfig


def variants(study, tok):
    """{name: MHFConfig} of the first group's entries."""
    found, sizes = {}, dict(vocab_size=len(tok.tokens), pad_id=tok.pad)
    for entry in study.entries:
        if entry['group'] == study.entries[0]['group']:
            settings = study.settings(entry, 0, 0)
            c = MHFConfig(**sizes | {k: v for k, v in settings.items() if k in MHFConfig.__annotations__})
            # signatures of another kind cost the same, and so do other weights and settings of training
            same = replace(c, num_lsh=0, embedding_std=0.02)
            if same not in found.values():
                found[entry['name']] = same
    return found, settings


def main(path):
    study, tok = sweep.Study(path), get_tokenizer('mistral')
    found, settings = variants(study, tok)
    bench.micro_batch_size, bench.block_size, bench.repeats = settings['batch_size'], settings['block_size'], 15
    bench.compile, bench.json = False, True
    device = pick_device()
    machine = bench.Machine(device, *pick_dtype(None, device))
    about = machine.describe()
    rows = bench.bench_train(machine, found, tok, about)
    end = {k: about[k] for k in ('device', 'dtype', 'torch')} | dict(threads=bench.torch.get_num_threads())
    end |= dict(gemm_flops=about['gemm_flops'], commit=commit())
    if machine.device_type == 'cuda':
        end['device'] = bench.torch.cuda.get_device_name(machine.device)
    fields = ('parameters', 'tokens_per_s', 'flops_per_token', 'gemm_share', 'peak_memory')
    path, ours = study.path.with_name('costs.csv'), []
    for name in found:
        ratio = rows[name]['seconds'] / rows[next(iter(found))]['seconds']
        print(f'{name}: {rows[name]["tokens_per_s"]:,.0f} tokens/s, {ratio:.2f} times the first')
        ours.append({'model': name, 'time / the first': f'{ratio:.3f}'} | {k: rows[name][k] for k in fields} | end)
    before = []
    if path.exists():
        with open(path, newline='') as f:
            here = end['device'], str(end['threads'])
            before = [row for row in csv.DictReader(f) if (row['device'], row['threads']) != here]
    with open(path.with_suffix('.tmp'), 'w', newline='') as f:
        writer = csv.DictWriter(f, ours[0], lineterminator='\n')
        writer.writeheader()
        writer.writerows(before + ours)
    replace_durably(path.with_suffix('.tmp'), path)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('list', help='a list of runs, like study/english.py')
    main(parser.parse_args().list)
