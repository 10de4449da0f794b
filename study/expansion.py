"""
Vocabulary expansion: models with 32,768 tokens learn Arabic, Chinese and Hindi, with 15,354 new tokens.

First: python expand.py study/expanded_tokenizer.py. The base models are trained on english_edu as in study/english.py,
tuned. expand.py adds the tokens. The expanded models are trained on as many tokens of each of the four languages; of
the layers, only the first and the last are trained (in the paper, two at each end). Learning rates are compared on
`mixture`, the held-out text of all four languages. All held-out text is also held out of the training of the tokenizer.
`informed` signatures know the counts of the base model's training data and the spelling of tokens; a new token gets the
buckets of its form and shape, and its frequency from as much text of each language as the training reads. `counts of 4
languages`: those of the base model's training data and of the text of the other three languages.
"""

_COUNTS = 'data/expansion_counts'
_TOKENIZER = 'out/tokenizer/tiny_ar_zh_hi.model'
_HELD_OUT = dict(val_fraction=0.05, val_bytes=150000)
_FILES = dict(english='english_edu', arabic='ar', chinese='zh', hindi='hi')
_MIXTURE = ','.join(f'{{corpus_dir}}/{_file}.jsonl.xz@204800' for _file in _FILES.values())
_ENGLISH = dict(dataset='{corpus_dir}/english_edu.jsonl.xz@1024000')
DATA = {
    'data/expansion_base': _ENGLISH | _HELD_OUT,
    'data/expansion': dict(dataset=_MIXTURE, tokenizer=_TOKENIZER, val_fraction=0.05, val_bytes=600000),
}
for _language, _file in _FILES.items():
    _recipe = dict(dataset=f'{{corpus_dir}}/{_file}.jsonl.xz@204800', tokenizer=_TOKENIZER)
    DATA[f'data/expansion_{_language}'] = _recipe | _HELD_OUT
DATA['data/expansion_english'] |= _ENGLISH
DATA[_COUNTS] = dict(dataset=_MIXTURE.replace('204800', '1024000', 1), val_fraction=0.05, val_bytes=600000)

_COMMON = dict(config='config/mhf_tiny_paper.py', seeds=(1, 2, 3), loss='exact', embedding_lr_mult=4.0, beta2=0.99)
_COMMON |= dict(micro_batch_size=8, compile=False, deterministic=True, dtype='bfloat16')
_STANDARD = dict(num_hashes=0, encoder_init='normal', embedding_scale=4.0)
_MHF = dict(num_hashes=4, num_buckets=7966, encoder_init='orthogonal', embedding_scale=8.0)
_BASE = _COMMON | dict(group='vocabulary of 32,768, 1.02 M tokens', train='data/expansion_base', learning_rates=(1e-3,))
_BASE |= dict(corpora=dict(english='data/expansion_base'), max_steps=500, eval_interval=500, warmup_steps=50)
_EXPANDED = _COMMON | dict(
    group='vocabulary of 48,122, then 0.82 M tokens of 4 languages', train='data/expansion', unfrozen_end_layers=1
)
_EXPANDED |= dict(corpora=dict(mixture='data/expansion') | {_name: f'data/expansion_{_name}' for _name in _FILES})
_EXPANDED |= dict(learning_rates=(5e-4, 1e-3, 2e-3), max_steps=400, eval_interval=400, warmup_steps=40)
_INFORMED = _MHF | dict(label='MHF H4, informed signatures')
_PREPARED = _MHF | dict(label='MHF H4, informed signatures, counts of 4 languages')

RUNS = [
    _BASE | _MHF | dict(name='MHF H4 B7,966, orthogonal', label='MHF H4'),
    _BASE | _INFORMED | dict(name='MHF H4 B7,966, informed', counts_from='data/expansion_base'),
    _BASE | _PREPARED | dict(name='MHF H4 B7,966, informed, counts of 4 languages', counts_from=_COUNTS),
    _BASE | _STANDARD | dict(name='Standard, scale 4', label='Standard'),
    # the same models, expanded
    _EXPANDED | _MHF | dict(name='MHF H4 B7,966, expanded', label='MHF H4', source='MHF H4 B7,966, orthogonal'),
    _EXPANDED | _INFORMED | dict(name='MHF H4 B7,966, informed, expanded', source='MHF H4 B7,966, informed'),
    _EXPANDED
    | _PREPARED
    | dict(name='MHF H4 B7,966, informed, counts of 4 languages, expanded')
    | dict(source='MHF H4 B7,966, informed, counts of 4 languages', learning_rates=(1e-3,)),
    _EXPANDED | _STANDARD | dict(name='Standard, expanded', label='Standard', source='Standard, scale 4'),
]
