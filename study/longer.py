"""
41 M tokens of english_edu, for a GPU: the models of study/english.py with 32,768 tokens, and with tekken's 131,072.

The complete corpus is read about once, in batches of 32 sequences of 256 tokens. All models are tuned: lr 1e-3,
embedding lr x4, beta2 0.99. `scale 4` and `orthogonal` are those of study/english.py; MHF H1 has a row of E for each
token; `informed` signatures know the counts and the spelling of tokens. The models are compiled, so a repeated row
differs by the rounding of a GPU's atomic adds. Five runs at a time (--jobs=5) fit one GPU; next to eight other runs,
they took seven minutes on an H200.
"""

_HELD_OUT = dict(dataset='{corpus_dir}/english_edu.jsonl.xz', val_fraction=0.03, val_bytes=300000)
# every document is held out, up to val_bytes; no run trains on the rest
_FINEWEB = dict(dataset='{corpus_dir}/fineweb_300.jsonl.xz', val_fraction=0.9, val_bytes=300000)
DATA = {
    'data/longer': _HELD_OUT,
    'data/study_fineweb': _FINEWEB,
    # these two are those of study/large_vocabulary.py
    'data/large_vocabulary': _HELD_OUT | dict(tokenizer='tekken'),
    'data/large_vocabulary_fineweb': _FINEWEB | dict(tokenizer='tekken'),
}
_COMMON = dict(config='config/mhf_tiny_paper.py', seeds=(1, 2, 3), learning_rates=(1e-3,), loss='exact')
_COMMON |= dict(embedding_lr_mult=4.0, beta2=0.99, batch_size=32, micro_batch_size=32, block_size=256)
_COMMON |= dict(max_steps=5000, eval_interval=1000, warmup_steps=500, compile=True, dtype='bfloat16')
_MISTRAL = _COMMON | dict(group='vocabulary of 32,768, 41 M tokens', train='data/longer')
_MISTRAL |= dict(corpora=dict(english='data/longer', fineweb='data/study_fineweb'))
_TEKKEN = _COMMON | dict(group='vocabulary of 131,072, 41 M tokens', train='data/large_vocabulary')
_TEKKEN |= dict(corpora=dict(english='data/large_vocabulary', fineweb='data/large_vocabulary_fineweb'))

_STANDARD = dict(name='Standard, tuned, scale 4', label='Standard', num_hashes=0)
_STANDARD |= dict(encoder_init='normal', embedding_scale=4.0)
_H4 = dict(name='MHF H4 B7,966, tuned, orthogonal', label='MHF H4', num_hashes=4, num_buckets=7966)
_H4 |= dict(encoder_init='orthogonal', embedding_scale=8.0)
_H1 = dict(name='MHF H1 B32,768, tuned, orthogonal', label='Standard with W_s', num_hashes=1, num_buckets=32768)
_H1 |= dict(encoder_init='orthogonal', embedding_scale=4.0)

_B16 = _TEKKEN | _H4 | dict(name='MHF H4 B16,384, tuned, orthogonal, informed', num_buckets=16384)
_INFORMED = dict(name='MHF H4 B7,966, tuned, orthogonal, informed', label='MHF H4, informed signatures')

RUNS = [_MISTRAL | _STANDARD, _MISTRAL | _H4, _MISTRAL | _H1, _TEKKEN | _STANDARD, _TEKKEN | _H4]
# the counts are of what a run reads: the complete corpus
RUNS += [group | _H4 | _INFORMED | dict(counts_from=group['train']) for group in (_MISTRAL, _TEKKEN)]
RUNS += [_B16 | dict(label='MHF H4 B16,384, informed signatures', counts_from=_TEKKEN['train'])]
