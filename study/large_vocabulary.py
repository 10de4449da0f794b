"""
A large vocabulary, tekken's 131,072 tokens; 1.02 M to 10.2 M tokens of english_edu, read in shuffled order.

Both held-out corpora are those of study/english.py. All models are tuned: lr 1e-3, embedding lr x4, beta2 0.99.
`orthogonal` initializes W_s to 8 times an orthogonal matrix (4 times in Standard); `scale 4` multiplies Standard's
input embeddings by 4.
`informed` signatures know the counts and the spelling of tokens, `ranges` the counts alone, which was counts_from's
table until the commit in `recorded`. `frozen bias` gives Standard the same counts (study/frozen_bias.py).
`rows of form and shape` give Standard with W_s the same spelling (study/spelling_rows.py).
"""

_ENGLISH = 'data/large_vocabulary'
_FINEWEB = 'data/large_vocabulary_fineweb'
_SAMPLE = 'data/large_vocabulary_3.07e6'
_SHORT_SAMPLE = 'data/large_vocabulary_1.02e6'
_LONG_SAMPLE = 'data/large_vocabulary_10.2e6'
_TEKKEN = dict(val_bytes=300000, tokenizer='tekken')
DATA = {
    _ENGLISH: _TEKKEN | dict(dataset='{corpus_dir}/english_edu.jsonl.xz', val_fraction=0.03),
    # every document is held out, up to val_bytes; no run trains on the rest
    _FINEWEB: _TEKKEN | dict(dataset='{corpus_dir}/fineweb_300.jsonl.xz', val_fraction=0.9),
}
# samples as large as what a run reads: counts of the complete corpus contain frequencies that a run could not learn
for _folder in (_SAMPLE, _SHORT_SAMPLE, _LONG_SAMPLE):
    _tokens = _folder.rpartition('_')[-1]
    DATA[_folder] = DATA[_ENGLISH] | dict(dataset=f'{{corpus_dir}}/english_edu.jsonl.xz@{_tokens}')
_COMMON = dict(train=_ENGLISH, corpora=dict(english=_ENGLISH, fineweb=_FINEWEB))
_COMMON |= dict(group='vocabulary of 131,072, 3.07 M tokens', config='config/mhf_tiny_paper.py', seeds=(1, 2, 3))
_COMMON |= dict(learning_rates=(1e-3,), loss='exact', embedding_lr_mult=4.0, beta2=0.99)
_COMMON |= dict(max_steps=1500, eval_interval=250, warmup_steps=150)
_COMMON |= dict(micro_batch_size=4, compile=False, deterministic=True, dtype='bfloat16')
_STANDARD = _COMMON | dict(name='Standard, scale 4', label='Standard', num_hashes=0)
_STANDARD |= dict(encoder_init='normal', embedding_scale=4.0)
_NARROW = _STANDARD | dict(name='Standard, 11.5 M, scale 4', label='Standard, d=84')
_NARROW |= dict(hidden_size=84, intermediate_size=252)
_BIAS = _STANDARD | dict(name='Standard, scale 4, frozen bias', label='Standard, frozen bias')
_BIAS |= dict(edit='study.frozen_bias', counts_from=_SAMPLE)
_H4 = _COMMON | dict(name='MHF H4 B7,966, orthogonal', label='MHF H4', num_hashes=4, num_buckets=7966)
_H4 |= dict(encoder_init='orthogonal', embedding_scale=8.0)
_INFORMED = _H4 | dict(name='MHF H4 B7,966, informed', label='MHF H4, informed signatures', counts_from=_SAMPLE)
_W_S = _STANDARD | dict(name='Standard with W_s, orthogonal', label='Standard with W_s', edit='study.standard_w_s')
_W_S |= dict(encoder_init='orthogonal')
_SPELLING = _W_S | dict(name='Standard, orthogonal, rows of form and shape', edit='study.spelling_rows')
_SPELLING |= dict(label='Standard with W_s and rows of form and shape')
_NO_COUNTS = _H4 | dict(name='MHF H4 B7,966, informed without counts', edit='study.no_counts')
_NO_COUNTS |= dict(label='MHF H4, form and shape without counts')
_RANGES = _H4 | dict(name='MHF H4 B7,966, ranges', label='MHF H4, frequency ranges', counts_from=_SAMPLE)
_RANGES |= dict(recorded='8e19a3c')
_SHORT = dict(group='vocabulary of 131,072, 1.02 M tokens', seeds=(1, 2, 3), max_steps=500, warmup_steps=50)
_LONG = dict(group='vocabulary of 131,072, 10.2 M tokens', seeds=(1, 2), max_steps=5000, warmup_steps=500)
_B16 = _SHORT | dict(seeds=(1,), num_buckets=16384)

RUNS = [
    _STANDARD,
    _H4,
    _INFORMED,
    _W_S,
    _BIAS,
    _RANGES,
    # on an H200
    _BIAS
    | dict(name='Standard, scale 4, frozen bias, all counts', label='Standard, frozen bias, counts of 39.5 M tokens')
    | dict(counts_from=_ENGLISH, seeds=(1, 2), micro_batch_size=8, compile=True, recorded='c9fd018'),
    _RANGES
    | dict(name='MHF H4 B7,966, ranges, all counts', label='MHF H4, frequency ranges, counts of 39.5 M tokens')
    | dict(counts_from=_ENGLISH),
    _NARROW,
    _STANDARD | _SHORT,
    _INFORMED | _SHORT | dict(counts_from=_SHORT_SAMPLE),
    _RANGES | _SHORT | dict(counts_from=_SHORT_SAMPLE),
    _SPELLING | _SHORT,
    _NO_COUNTS | _SHORT | dict(counts_from=_SHORT_SAMPLE),
    _W_S | _SHORT,
    _H4 | _B16 | dict(name='MHF H4 B16,384, orthogonal', label='MHF H4 B16,384'),
    _RANGES
    | _B16
    | dict(name='MHF H4 B16,384, ranges', label='MHF H4 B16,384, frequency ranges', counts_from=_SHORT_SAMPLE),
    _INFORMED | _LONG | dict(counts_from=_LONG_SAMPLE),
    _STANDARD | _LONG,
    _NARROW | _LONG,
    _H4 | _LONG,
]
