"""
A large vocabulary, tekken's 131,072 tokens; 3.07 M tokens of english_edu, read in shuffled order.

Both held-out corpora are those of study/english.py. All models are tuned: lr 1e-3, embedding lr x4, beta2 0.99.
`orthogonal` initializes W_s to 8 times an orthogonal matrix; `scale 4` multiplies Standard's input embeddings by 4;
`ranges` are hashing.frequency_table's.
"""

_ENGLISH = 'data/large_vocabulary'
_FINEWEB = 'data/large_vocabulary_fineweb'
_SAMPLE = 'data/large_vocabulary_3.07e6'
_SHORT_SAMPLE = 'data/large_vocabulary_1.02e6'
DATA = {
    _ENGLISH: dict(
        dataset='{corpus_dir}/english_edu.jsonl.xz', val_fraction=0.03, val_bytes=300000, tokenizer='tekken'
    ),
    # every document is held out, up to val_bytes; no run trains on the rest
    _FINEWEB: dict(dataset='{corpus_dir}/fineweb_300.jsonl.xz', val_fraction=0.9, val_bytes=300000, tokenizer='tekken'),
    # a sample as large as a run reads: counts of the complete corpus contain frequencies that a run could not learn
    _SAMPLE: dict(
        dataset='{corpus_dir}/english_edu.jsonl.xz@3.07e6', val_fraction=0.03, val_bytes=300000, tokenizer='tekken'
    ),
    _SHORT_SAMPLE: dict(
        dataset='{corpus_dir}/english_edu.jsonl.xz@1.02e6', val_fraction=0.03, val_bytes=300000, tokenizer='tekken'
    ),
}
_COMMON = dict(train=_ENGLISH, corpora=dict(english=_ENGLISH, fineweb=_FINEWEB))
_COMMON |= dict(
    group='vocabulary of 131,072, 3.07 M tokens', config='config/mhf_tiny.py', seeds=(1, 2, 3), learning_rates=(1e-3,)
)
_COMMON |= dict(loss='exact', num_lsh=0, single_id=False, ablation='')
_COMMON |= dict(embedding_lr_mult=4.0, beta1=0.9, beta2=0.99, weight_decay=0.1, grad_clip=1.0)
_COMMON |= dict(max_steps=1500, eval_interval=250, warmup_steps=150, lr_decay_steps=0)
_COMMON |= dict(micro_batch_size=4, compile=False, deterministic=True, dtype='bfloat16')
_STANDARD = _COMMON | dict(num_hashes=0, encoder_init='normal', embedding_scale=4.0)
_H4 = _COMMON | dict(num_hashes=4, num_buckets=7966, encoder_init='orthogonal', embedding_scale=8.0)
_SHORT = _H4 | dict(group='vocabulary of 131,072, 1.02 M tokens', seeds=(1, 2), max_steps=500, warmup_steps=50)

RUNS = [
    _STANDARD | dict(name='Standard, scale 4', label='Standard'),
    _H4 | dict(name='MHF H4 B7,966, orthogonal', label='MHF H4'),
    _H4 | dict(name='MHF H4 B7,966, ranges', label='MHF H4, frequency ranges', counts_from=_SAMPLE),
    _H4
    | dict(name='MHF H4 B7,966, ranges, all counts', label='MHF H4, frequency ranges, counts of 39.5 M tokens')
    | dict(counts_from=_ENGLISH),
    _SHORT | dict(name='MHF H4 B7,966, ranges', label='MHF H4, frequency ranges', counts_from=_SHORT_SAMPLE),
    # counts of 0.43 M tokens of another source
    _SHORT
    | dict(name='MHF H4 B7,966, ranges, fineweb counts', label='MHF H4, frequency ranges, counts of fineweb')
    | dict(counts_from=_FINEWEB),
    _SHORT | dict(name='MHF H4 B16,384, orthogonal', label='MHF H4 B16,384', num_buckets=16384),
    _SHORT
    | dict(name='MHF H4 B16,384, ranges', label='MHF H4 B16,384, frequency ranges', num_buckets=16384)
    | dict(counts_from=_SHORT_SAMPLE),
    # takes about as long as MHF
    _STANDARD
    | dict(name='Standard, scale 4, half the tokens', label='Standard, on half of the tokens')
    | dict(max_steps=750, warmup_steps=75),
    _STANDARD
    | dict(name='Standard, 11.5 M, scale 4', label='Standard, d=84')
    | dict(hidden_size=84, intermediate_size=252),
]

MEASURE = 'bits_per_byte'
CLAIMS = [
    ('MHF H4 with frequency ranges or Standard', 'MHF H4 B7,966, ranges', 'Standard, scale 4'),
    ('MHF H4 or Standard', 'MHF H4 B7,966, orthogonal', 'Standard, scale 4'),
    ('frequency ranges or none', 'MHF H4 B7,966, ranges', 'MHF H4 B7,966, orthogonal'),
    ('frequency ranges or none', 'MHF H4 B16,384, ranges', 'MHF H4 B16,384, orthogonal'),
    ('counts of 39.5 M or of 3.07 M tokens', 'MHF H4 B7,966, ranges, all counts', 'MHF H4 B7,966, ranges'),
    ('MHF H4 with counts of 39.5 M tokens or Standard', 'MHF H4 B7,966, ranges, all counts', 'Standard, scale 4'),
    ('counts of fineweb or of english', 'MHF H4 B7,966, ranges, fineweb counts', 'MHF H4 B7,966, ranges'),
    ('MHF H4, or Standard on half of the tokens', 'MHF H4 B7,966, orthogonal', 'Standard, scale 4, half the tokens'),
    ('MHF H4 or Standard, equal parameters', 'MHF H4 B7,966, orthogonal', 'Standard, 11.5 M, scale 4'),
]
