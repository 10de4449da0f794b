"""sample.py with a checkpoint alone and with a released model."""

import os
import re
import shutil

from conftest import ok

from mhf.checkpoint import read_checkpoint
from test_mhf import write_released


def test_sample_from_the_checkpoint_alone(trained, tmp_path):
    """sample.py needs only the checkpoint, prints the prompt, and prints the same text for the same seed."""
    (tmp_path / 'x/y').mkdir(parents=True)
    shutil.copy(trained / 'out/ckpt.pt', tmp_path / 'x/y/ckpt.pt')
    (tmp_path / 'ckpt.pt').write_text('damaged')
    os.utime(tmp_path / 'ckpt.pt', (1, 1))  # older
    args = ['--max_new_tokens=30', '--num_samples=2', '--seed=3', '--device=cpu']
    first = ok('sample.py', *args, '--start=def main(x=1):', cwd=tmp_path)
    assert 'x/y/ckpt.pt, step 24' in first.stderr and re.search(r'[\d.]+ tokens/s', first.stderr)
    assert first.stdout.count('def main(x=1):') == 2
    assert ok('sample.py', *args, '--start=def main(x=1):', cwd=tmp_path).stdout == first.stdout
    # a byte order mark is dropped
    (tmp_path / 'prompt.txt').write_text('\ufeffdef main(x=1):', encoding='utf-8')
    assert ok('sample.py', *args, '--start=FILE:prompt.txt', '--out_dir=x/y', cwd=tmp_path).stdout == first.stdout
    path = f'--out_dir={trained}/out/ckpt_best.pt'
    assert f'{path[10:]}, step 24' in ok('sample.py', *args, path, cwd=tmp_path).stderr
    # a prompt that is longer than the context
    ok('sample.py', *args, '--temperature=0', '--start=word ' * 100, cwd=tmp_path)


def sample_ids(folder, ids, start='x', out_dir='out'):
    """Returns the text that sample.py prints if a model in a folder generates the token ids `ids`."""
    patch = 'import torch; from mhf.generate import Engine\n'
    patch += f'Engine.stream = lambda *_: (torch.tensor([i]) for i in {ids})'
    args = ('--num_samples=1', '--device=cpu', f'--start={start}', f'--out_dir={out_dir}')
    done = ok('sample.py', *args, cwd=folder, patch=patch)
    return done.stdout.split('\n', 1)[1]


def test_a_sample_ends_with_its_document(trained, tmp_path, mistral):
    """A sample ends at bos, eos, or any eos that a released model declares; nothing after it is printed."""
    expected = mistral.decode([1, *mistral.encode(['x'])[0], 4000, 4001]) + '\n'
    for end in (1, 2):
        assert sample_ids(trained, [4000, 4001, end, 4002]) == expected
    model, _ = read_checkpoint(trained / 'out/ckpt.pt')
    write_released(tmp_path / 'r', model, eos_token_id=[2, 5000], pad_token_id=2)
    assert sample_ids(tmp_path, [4000, 4001, 5000, 4002], out_dir='r') == expected


def test_characters_are_complete(trained, mistral):
    """A character of several tokens is printed when complete; an incomplete one is not printed."""
    cherokee = [mistral.tokens.index(f'<0x{byte:02X}>') for byte in 'Ꭰ'.encode()]
    assert sample_ids(trained, [*cherokee, *cherokee[:2]]) == 'xᎠ\n'
    # the context starts inside a character
    assert sample_ids(trained, cherokee, start='Ꭰ' * 30) == 'Ꭰ' * 31 + '\n'
