"""
Three tokenizers: the same text, 464 documents or 4,228,682 bytes, read once.

MHF H4 B7,966 has 11.5 M parameters with each tokenizer; Standard has one more row for each token. The tokenizer
`expanded` is mistral with 15,354 tokens of Arabic, Chinese and Hindi, which English does not use. Make it first: python
expand.py study/expanded_tokenizer.py. The settings are those of study/english.py. The text has 1,029,579 tokens with
mistral, 1,029,576 with expanded and 942,412 with tekken, of which the order of sequences omits up to 0.12 %.
"""

_ENGLISH = dict(val_fraction=0.07, val_bytes=300000)
# all of what is read is held out
_FINEWEB = dict(dataset='{corpus_dir}/fineweb_300.jsonl.xz', val_fraction=0.9, val_bytes=300000)
# name: (tokenizer, its size, a number of training tokens that ends in the 464th document, the steps of one epoch)
_TOKENIZERS = {
    'mistral': ('mistral', 32768, 1024000, 502),
    'expanded': ('out/tokenizer/tiny_ar_zh_hi.model', 48122, 1024000, 502),
    'tekken': ('tekken', 131072, 942000, 460),
}
_STANDARD = dict(name='Standard', label='Standard, plain', learning_rates=(2e-3, 4e-3), num_hashes=0)
_MHF = dict(name='MHF H4 B7,966', label='MHF H4, plain', learning_rates=(2e-3, 4e-3), num_hashes=4, num_buckets=7966)

DATA = {}
RUNS = []
for _name, (_tokenizer, _size, _tokens, _steps) in _TOKENIZERS.items():
    _english = f'data/vocabulary_{_name}'
    _fineweb = f'data/vocabulary_fineweb_{_name}'
    _dataset = f'{{corpus_dir}}/english_edu.jsonl.xz@{_tokens}'
    DATA |= {_english: _ENGLISH | dict(dataset=_dataset, tokenizer=_tokenizer)}
    DATA |= {_fineweb: _FINEWEB | dict(tokenizer=_tokenizer)}
    _group = f'vocabulary of {_size:,}, {_steps * 2048 / 1e6:.2f} M tokens'
    _common = dict(group=_group, config='config/mhf_tiny_paper.py', loss='exact', seeds=(1, 2, 3))
    _common |= dict(beta2=0.95, embedding_lr_mult=1.0, encoder_init='normal', embedding_scale=1.0)
    _common |= dict(micro_batch_size=8, compile=False, deterministic=True, dtype='bfloat16')
    _common |= dict(train=_english, corpora=dict(english=_english, fineweb=_fineweb))
    _common |= dict(max_steps=_steps, eval_interval=_steps // 2, warmup_steps=_steps // 10)
    RUNS += [_common | _STANDARD, _common | _MHF]
