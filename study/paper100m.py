"""
The paper's 100M models (config/*_100m*.py), for a GPU: 2 to 3 minutes per run.

Batches are 32 sequences of 2,048 tokens; warm-up takes a tenth of the steps. 625 steps read 41 M tokens of textbooks
and an encyclopedia once. Standard+4L has as many parameters as MHF H4B16K, Standard as many in its decoder. `tuned`
is embedding lr x4, beta2 0.99, and the learning rate that is best with 10 M tokens; variants have the learning rate of
their model. `the paper's optimizer` is lr 5e-4 and beta2 0.999. `scale 4` and `orthogonal` are those of
study/english.py. The models are compiled, so a repeated row differs by the rounding of a GPU's atomic adds.
"""

_ENGLISH = 'data/paper100m'
_FINEWEB = 'data/paper100m_fineweb'
DATA = {
    _ENGLISH: dict(dataset='{corpus_dir}/english_edu.jsonl.xz', val_fraction=0.05, val_bytes=1e7),
    # every document is held out, up to val_bytes; no run trains on the rest
    _FINEWEB: dict(dataset='{corpus_dir}/fineweb_300.jsonl.xz', val_fraction=0.9, val_bytes=300000),
}
_COMMON = dict(train=_ENGLISH, corpora=dict(english=_ENGLISH, fineweb=_FINEWEB), loss='exact', seeds=(1,))
_COMMON |= dict(batch_size=32, block_size=2048, micro_batch_size=16, compile=True, dtype='bfloat16')
# the paper's initialization and AdamW, except where an entry names another
_COMMON |= dict(encoder_init='normal', embedding_scale=1.0, num_lsh=0, single_id=False, ablation='')
_COMMON |= dict(beta1=0.9, weight_decay=0.1, grad_clip=1.0, lr_decay_steps=0)
_COMMON |= dict(embedding_lr_mult=4.0, beta2=0.99)
_SHORT = _COMMON | dict(group='100M, 10 M tokens', max_steps=152, warmup_steps=15, eval_interval=152)
_LONG = _COMMON | dict(group='100M, 40 M tokens', max_steps=625, warmup_steps=62, eval_interval=625)

_STANDARD = dict(name='Standard, tuned', config='config/standard_100m.py', learning_rates='Standard, tuned')
_DEEPER = dict(name='Standard+4L, tuned', config='config/standard_100m_4l.py', learning_rates='Standard, tuned')
_MHF = dict(name='MHF H4B16K, tuned', config='config/mhf_100m.py', learning_rates='MHF H4B16K, tuned')
_H3 = dict(name='MHF H3B10K, tuned', config='config/mhf_100m_h3b10k.py', learning_rates='MHF H4B16K, tuned')
_ORTHOGONAL = dict(name='MHF H4B16K, tuned, orthogonal', encoder_init='orthogonal', embedding_scale=8.0)
_PAPERS = dict(learning_rates=(5e-4,), embedding_lr_mult=1.0, beta2=0.999)

RUNS = [
    *(_SHORT | model | dict(learning_rates=(5e-4, 1e-3)) for model in (_STANDARD, _MHF)),
    *(_LONG | model | dict(seeds=(1, 2, 3)) for model in (_STANDARD, _MHF, _DEEPER)),
    _LONG | _MHF | _ORTHOGONAL,
    _LONG | _STANDARD | dict(name='Standard, tuned, scale 4', embedding_scale=4.0),
    _LONG | _MHF | dict(name='MHF H4B16K, tuned, product loss', loss='product'),
    _LONG | _STANDARD | _PAPERS | dict(name="Standard, the paper's optimizer"),
    _LONG | _MHF | _PAPERS | dict(name="MHF H4B16K, the paper's optimizer"),
    _LONG | _H3,
]
