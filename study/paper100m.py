"""
The paper's 100M models

The paper's 100M configs (config/*_100m*.py) as they are, but for batch and steps: 32 sequences of 2,048 tokens, 625
steps, a tenth of them warm-up, then a cosine to 0. They read 41 M tokens of the textbooks and the encyclopaedia, all
of them once, without the 5 % that are held out as `english`; `fineweb` is of another source. Standard+4L has as many
parameters in all as H4B16K, Standard as many in its decoder. The optimizer is English's tuned one: 4 times the rate for
E, and beta2 0.99. Standard's and H4B16K's rates are those that were best with 10 M tokens, and the others have the
rate of the model that they vary. `The paper's optimizer` is a rate of 5e-4 for all, and beta2 0.999. `Loud` and
`turned` are what they are in English.

The list is for a GPU, which takes 2 to 3 minutes a run. It is compiled, so that a row that is run again differs by the
rounding of a GPU's atomic adds.
"""

_FOLDER = '../shared/data/text'
_ENGLISH = 'data/paper100m'
_FINEWEB = 'data/paper100m_fineweb'
DATA = {
    _ENGLISH: dict(dataset=f'{_FOLDER}/english_edu.jsonl.xz', val_fraction=0.05, val_bytes=1e7),
    # all of what is read is held out
    _FINEWEB: dict(dataset=f'{_FOLDER}/fineweb_300.jsonl.xz', val_fraction=0.9, val_bytes=300000),
}
_COMMON = dict(train=_ENGLISH, texts=dict(english=_ENGLISH, fineweb=_FINEWEB), loss='exact', seeds=(1,))
_COMMON |= dict(batch_size=32, block_size=2048, micro_batch_size=16, compile=True, dtype='bfloat16')
# the paper's initialization and AdamW, except where an entry names another
_COMMON |= dict(encoder_init='normal', embedding_scale=1.0, num_lsh=0, single_id=False, ablation='')
_COMMON |= dict(beta1=0.9, weight_decay=0.1, grad_clip=1.0, lr_decay_steps=0)
_SHORT = _COMMON | dict(group='100M, 10 M tokens', max_steps=152, warmup_steps=15, eval_interval=152)
_LONG = _COMMON | dict(group='100M, 40 M tokens', max_steps=625, warmup_steps=62, eval_interval=625)

_TUNED = dict(embedding_lr_mult=4.0, beta2=0.99)
_PAPERS = dict(rates=(5e-4,), embedding_lr_mult=1.0, beta2=0.999)
_RATES = dict(rates=(5e-4, 1e-3))
_SEEDS = dict(seeds=(1, 2, 3))
_STANDARD = dict(name='Standard, 100M', config='config/standard_100m.py')
_DEEPER = dict(name='Standard+4L, 100M', config='config/standard_100m_4l.py', rates=_STANDARD['name'])
_H4 = dict(name='H4B16K', config='config/mhf_100m.py')
_H3 = dict(name='H3B10K', config='config/mhf_100m_h3b10k.py', rates=_H4['name'])
_PRODUCT = _H4 | dict(name='H4B16K, product', loss='product', rates=_H4['name'])

_LOUD_STANDARD = _STANDARD | dict(name='Standard, 100M, loud', rates=_STANDARD['name'], embedding_scale=4.0)
_TURNED_H4 = _H4 | dict(name='H4B16K, turned', rates=_H4['name'], encoder_init='orthogonal', embedding_scale=8.0)

MAIN = (_STANDARD['name'], _DEEPER['name'], _H4['name'])
_ON_FINEWEB = dict(on='fineweb')
CLAIMS = dict(
    loss=[("The exact loss is better than the paper's", 'H4B16K', 'H4B16K, product')],
    standard=[
        ('H4B16K is better than Standard', 'H4B16K', 'Standard, 100M'),
        ('H4B16K is better than Standard with 4 layers more, of as many parameters', 'H4B16K', 'Standard+4L, 100M'),
        ('H4B16K is better on FineWeb than Standard with 4 layers more', 'H4B16K', 'Standard+4L, 100M', _ON_FINEWEB),
        (
            "H4B16K is better than Standard with the paper's optimizer",
            "H4B16K, the paper's optimizer",
            "Standard, 100M, the paper's optimizer",
        ),
        ('A turned H4B16K is better than a loud Standard', 'H4B16K, turned', 'Standard, 100M, loud'),
    ],
    optimizer=[
        ('Being turned helps H4B16K', 'H4B16K, turned', 'H4B16K'),
        ('Being loud helps Standard', 'Standard, 100M, loud', 'Standard, 100M'),
    ],
    parts=[('H4B16K is better than H3B10K', 'H4B16K', 'H3B10K')],
)

# in the order of their worth
RUNS = [
    _SHORT | _STANDARD | _TUNED | _RATES,
    _SHORT | _H4 | _TUNED | _RATES,
    _LONG | _STANDARD | _TUNED | _SEEDS | dict(rates=_STANDARD['name']),
    _LONG | _H4 | _TUNED | _SEEDS | dict(rates=_H4['name']),
    _LONG | _DEEPER | _TUNED | _SEEDS,
    _LONG | _TURNED_H4 | _TUNED,
    _LONG | _LOUD_STANDARD | _TUNED,
    _LONG | _PRODUCT | _TUNED,
    _LONG | _STANDARD | _PAPERS | dict(name="Standard, 100M, the paper's optimizer"),
    _LONG | _H4 | _PAPERS | dict(name="H4B16K, the paper's optimizer"),
    _LONG | _H3 | _TUNED,
]
