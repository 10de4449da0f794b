"""
The demo's model (config/mhf_tiny.py, d=256, 4 layers) on textbooks and an encyclopedia, 1.02 M to 10.2 M tokens.

`english` is held out of the training corpus, `fineweb` is another source. H is the number of hashes, B that of buckets:
MHF H4 B7,966 has as many parameters as Standard, and so have H3 and H2. All are trained with the exact loss, except
`product loss`, by AdamW: linear warm-up over a tenth of the steps, cosine to 0, beta2 0.95, weight decay 0.1, gradient
norm 1. `tuned` is lr 1e-3, embedding lr x4 and beta2 0.99; `scale 4` multiplies Standard's input embeddings by 4;
`orthogonal` initializes W_s to 8 times an orthogonal matrix (4 times with H1 and in Standard, which do not average
rows), so that a token enters the decoder with the standard deviation of scale 4. Everything else is initialized as in
the paper.
`informed` signatures know the counts and the spelling of tokens, `ranges` the counts alone, which was counts_from's
table until the commit in `recorded`.
"""

_SAMPLE = 'data/study_english_3.07e6'
_SHORT_SAMPLE = 'data/study_english_1.02e6'
_LONG_SAMPLE = 'data/study_english_10.2e6'
_HELD_OUT = dict(val_fraction=0.03, val_bytes=300000)
DATA = {
    'data/study_english': _HELD_OUT | dict(dataset='{corpus_dir}/english_edu.jsonl.xz@5e6'),
    # the same held-out text, and twice as much for training
    'data/study_english_10m': _HELD_OUT | dict(dataset='{corpus_dir}/english_edu.jsonl.xz@10300000'),
    # for counts: as many tokens as a run reads
    _SAMPLE: _HELD_OUT | dict(dataset='{corpus_dir}/english_edu.jsonl.xz@3.07e6'),
    _SHORT_SAMPLE: _HELD_OUT | dict(dataset='{corpus_dir}/english_edu.jsonl.xz@1.02e6'),
    _LONG_SAMPLE: _HELD_OUT | dict(dataset='{corpus_dir}/english_edu.jsonl.xz@10.2e6'),
    # every document is held out, up to val_bytes; no run trains on the rest
    'data/study_fineweb': dict(dataset='{corpus_dir}/fineweb_300.jsonl.xz', val_fraction=0.9, val_bytes=300000),
}
_COMMON = dict(train='data/study_english', corpora=dict(english='data/study_english', fineweb='data/study_fineweb'))
_COMMON |= dict(config='config/mhf_tiny_paper.py', loss='exact', seeds=(1, 2, 3), beta2=0.95, embedding_lr_mult=1.0)
# the paper's initialization
_COMMON |= dict(encoder_init='normal', embedding_scale=1.0)
# for a GPU: compiling takes longer than a run, and a repeated run gives the same numbers
_COMMON |= dict(micro_batch_size=8, compile=False, deterministic=True, dtype='bfloat16')
_SHORT = _COMMON | dict(group='vocabulary of 32,768, 1.02 M tokens', max_steps=500, eval_interval=250, warmup_steps=50)
_LONG = _COMMON | dict(group='vocabulary of 32,768, 3.07 M tokens', max_steps=1500, eval_interval=500, warmup_steps=150)
_WIDE = _SHORT | dict(group='vocabulary of 32,768, 1.02 M tokens, d=384, 6 layers')
_WIDE |= dict(hidden_size=384, num_layers=6, num_heads=6, intermediate_size=1152)
_LONG_WIDE = _WIDE | dict(
    group='vocabulary of 32,768, 3.07 M tokens, d=384, 6 layers', max_steps=1500, eval_interval=500, warmup_steps=150
)
_LONGEST = _COMMON | dict(group='vocabulary of 32,768, 10.2 M tokens', train='data/study_english_10m')
_LONGEST |= dict(max_steps=5000, eval_interval=1000, warmup_steps=500)

_STANDARD = dict(num_hashes=0)
_MHF = dict(name='MHF H4 B7,966', label='MHF H4, plain', learning_rates=(1e-3, 2e-3, 4e-3, 5e-4))
_MHF |= dict(num_hashes=4, num_buckets=7966)
_VARIANTS = [
    dict(name='MHF H3 B10,686', label='MHF H3 B10,686, plain', num_hashes=3, num_buckets=10686),
    dict(name='MHF H2 B16,126', label='MHF H2 B16,126, plain', num_hashes=2, num_buckets=16126),
    dict(name='MHF H4 B7,966, no cascade', label='MHF H4, plain, no cascade', ablation='no_cascade'),
    dict(name='MHF H4 B7,966, LSH:MMH3 2:2', label='MHF H4, plain, LSH', num_lsh=2),
]
_HARD = dict(name='MHF H4 B7,966, hard embeddings', label='MHF H4, plain, hard embeddings', ablation='hard_embeddings')
_HARD |= dict(recorded='0c7d810')

_TUNED = dict(learning_rates=(1e-3,), embedding_lr_mult=4.0, beta2=0.99)
_SCALED = _STANDARD | _TUNED | dict(name='Standard, tuned, scale 4', label='Standard', embedding_scale=4.0)
_H4 = _MHF | _TUNED | dict(name='MHF H4 B7,966, tuned, orthogonal', label='MHF H4')
_H4 |= dict(encoder_init='orthogonal', embedding_scale=8.0)
_TUNED_MODELS = [
    _STANDARD | _TUNED | dict(name='Standard, tuned', label='Standard, embeddings x 1'),
    _MHF | _TUNED | dict(name='MHF H4 B7,966, tuned', label='MHF H4, Gaussian W_s'),
    _SCALED,
    _H4,
]

RUNS = [
    _SHORT | _MHF,
    _SHORT | _MHF | dict(name='MHF H4 B7,966, product loss', label='MHF H4, plain, product loss', loss='product'),
    _SHORT | _MHF | dict(name='MHF H4 B7,966, Single-ID', label='MHF H4, plain, Single-ID', single_id=True),
    _SHORT | _MHF | dict(name='MHF H4 B7,966, mean gate', label='MHF H4, plain, mean gate', ablation='mean_gate'),
    _SHORT | _MHF | _HARD,
    _LONG | _MHF,
]
# at the best learning rate of MHF H4
RUNS += [_LONG | _MHF | _variant | dict(learning_rates=(2e-3,)) for _variant in _VARIANTS]
for _model in _TUNED_MODELS:
    # B for as many parameters as Standard with d=384
    _wide = dict(name=_model['name'].replace('7,966', '7,934'))
    _wide |= dict(num_buckets=7934) if _model['num_hashes'] else {}
    RUNS += [_SHORT | _model, _LONG | _model, _WIDE | _model | _wide]
    if _model in (_SCALED, _H4):
        RUNS += [_LONGEST | _model, _LONG_WIDE | _model | _wide]
# a control: one row of E for each token, as in Standard, and W_s
_ONE_ROW = dict(name='MHF H1 B32,768, tuned, orthogonal', label='Standard with W_s', num_hashes=1, num_buckets=32768)
RUNS += [_group | _H4 | _ONE_ROW | dict(embedding_scale=4.0) for _group in (_SHORT, _LONG, _LONGEST)]
# counts and spelling, at the sizes of the demo and at those of Standard
_DEMO = _H4 | dict(name='MHF H3 B2,048, tuned, orthogonal', label='MHF H3 B2,048', num_hashes=3, num_buckets=2048)
for _model, _group, _sample in ((_DEMO, _LONG, _SAMPLE), (_H4, _SHORT, _SHORT_SAMPLE), (_H4, _LONG, _SAMPLE)):
    _ranges = dict(name=f'{_model["name"]}, ranges', label=f'{_model["label"]}, frequency ranges', recorded='8e19a3c')
    _informed = dict(name=f'{_model["name"]}, informed', label=f'{_model["label"]}, informed signatures')
    RUNS += [_group | _model | _signatures | dict(counts_from=_sample) for _signatures in (_ranges, _informed)]
RUNS += [_LONGEST | _H4 | _informed | dict(counts_from=_LONG_SAMPLE)]
# controls: Standard that knows the spelling, and MHF that knows nothing else
_SPELLING = dict(name='Standard, tuned, scale 4, rows of form and shape', label='Standard with rows of form and shape')
_SPELLING |= dict(edit='study.spelling_rows')
_SPELLING_W_S = dict(name='Standard, tuned, orthogonal, rows of form and shape', encoder_init='orthogonal')
_SPELLING_W_S |= dict(label='Standard with W_s and rows of form and shape')
RUNS += [_SHORT | _SCALED | _SPELLING]
RUNS += [_group | _SCALED | _SPELLING | _SPELLING_W_S for _group in (_SHORT, _LONG)]
_NO_COUNTS = dict(name='MHF H4 B7,966, tuned, orthogonal, informed without counts', edit='study.no_counts')
_NO_COUNTS |= dict(label='MHF H4, form and shape without counts', counts_from=_SHORT_SAMPLE)
_PRODUCT = dict(name='MHF H4 B7,966, tuned, orthogonal, product loss', label='MHF H4, product loss', loss='product')
RUNS += [_SHORT | _H4 | _NO_COUNTS, _LONG | _DEMO, _SHORT | _H4 | _PRODUCT]
