"""
Large vocabulary: tekken's 131,072 tokens

english_edu is read in shuffled order, 1,500 steps of 8 x 256 tokens. Both held-out corpora are those of English. All
models are tuned: learning rate 1e-3, 4 times that for E, beta2 0.99.
"""

_FOLDER = '../shared/data/text'
_ENGLISH = 'data/large_vocabulary'
_FINEWEB = 'data/large_vocabulary_fineweb'
DATA = {
    _ENGLISH: dict(dataset=f'{_FOLDER}/english_edu.jsonl.xz', val_fraction=0.03, val_bytes=300000, tokenizer='tekken'),
    _FINEWEB: dict(dataset=f'{_FOLDER}/fineweb_300.jsonl.xz', val_fraction=0.9, val_bytes=300000, tokenizer='tekken'),
}
_COMMON = dict(train=_ENGLISH, texts=dict(english=_ENGLISH, fineweb=_FINEWEB))
_COMMON |= dict(group='tekken, 3.07 M tokens', config='config/mhf_tiny.py', seeds=(1, 2, 3), rates=(1e-3,))
_COMMON |= dict(loss='exact', num_lsh=0, single_id=False, ablation='')
_COMMON |= dict(embedding_lr_mult=4.0, beta1=0.9, beta2=0.99, weight_decay=0.1, grad_clip=1.0)
_COMMON |= dict(max_steps=1500, eval_interval=250, warmup_steps=150, lr_decay_steps=0)
_COMMON |= dict(micro_batch_size=4, compile=False, deterministic=True, dtype='bfloat16')
_STANDARD = _COMMON | dict(num_hashes=0, encoder_init='normal', embedding_scale=4.0)
_H4 = _COMMON | dict(num_hashes=4, num_buckets=7966, encoder_init='orthogonal', embedding_scale=8.0)

RUNS = [
    _H4 | dict(name='MHF H4 B7,966, orthogonal'),
    _STANDARD | dict(name='Standard, scale 4'),
    _STANDARD | dict(name='Standard, 11.5 M, scale 4', hidden_size=84, intermediate_size=252),
]
