"""
Vocabulary: the same text by three tokenizers

H4 has 11.5 M parameters with each tokenizer (B is 7,966), Standard has one more row for each token. With tekken there
is also a Standard model of 11.5 M, whose rows have 84 numbers in place of 256, and H4 tuned as it is. The tokenizer
expanded is mistral with 15,354 tokens of Arabic, Chinese and Hindi, of which English uses none; the command `python
expand.py config/expand_tiny.py --before= --init_from=` makes it first. Every run reads the same 464 documents once,
4,228,682 bytes: 1,029,579 tokens by mistral, 1,029,576 by expanded, 942,412 by tekken, so 502, 502 and 460 steps. The
order of blocks leaves out 0.12 % of them at most. Bits per byte compare tokenizers, nats per token do not. All else is
as in English, also what `tuned` means.
"""

_FOLDER = '../shared/data/text'
_ENGLISH = dict(val_fraction=0.07, val_bytes=300000)
# all of what is read is held out
_FINEWEB = dict(dataset=f'{_FOLDER}/fineweb_300.jsonl.xz', val_fraction=0.9, val_bytes=300000)
# of each tokenizer: its name, a number of training tokens that ends in the 464th document, the steps of one epoch
_TOKENIZERS = {
    'mistral': ('mistral', 1024000, 502),
    'expanded': ('out/tokenizer/tiny_ar_zh_hi.model', 1024000, 502),
    'tekken': ('tekken', 942000, 460),
}
_MODELS = [
    dict(name='Standard', rates=(2e-3, 4e-3), num_hashes=0),
    dict(name='H4', rates=(2e-3, 4e-3), num_hashes=4, num_buckets=7966),
]
# with tekken alone, which is the last
_TUNED = dict(rates=(1e-3,), embedding_lr_mult=4.0, beta2=0.99)
_TUNED_H4 = _MODELS[1] | _TUNED | dict(name='H4, tuned')
_SMALL = _MODELS[0] | _TUNED | dict(name='Standard, 11.5 M, tuned', hidden_size=84, intermediate_size=252)

VOCABULARIES = {'mistral': 32768, 'expanded': 48122, 'tekken': 131072}
_ON_FINEWEB = dict(on='fineweb')
CLAIMS = dict(
    vocabulary=[
        ('H4, which does not grow, is better than Standard', 'H4', 'Standard'),
        ('H4, which does not grow, is better than Standard on FineWeb', 'H4', 'Standard', _ON_FINEWEB),
        ('H4 is better than Standard of as many parameters, both tuned', 'H4, tuned', 'Standard, 11.5 M, tuned'),
        (
            'H4 is better on FineWeb than Standard of as many parameters, both tuned',
            'H4, tuned',
            'Standard, 11.5 M, tuned',
            _ON_FINEWEB,
        ),
    ]
)
_TEKKEN = dict(group='tekken', better='H4', than='Standard')
SENTENCES = dict(
    vocabulary=(
        'With 131,072 tokens in place of 32,768 H4 keeps its {0.sizes[0]} parameters and is {0.word} what it was in '
        'bits per byte ({0.figure}; on FineWeb {1.word} it, {1.figure}), where Standard grows to {2.sizes[1]}; H4 is '
        '{2.word} that Standard ({2.figure}), and {3.word} it on FineWeb ({3.figure}).',
        [
            _TEKKEN | dict(than='H4', than_group='mistral', measure='bits_per_byte'),
            _TEKKEN | dict(than='H4', than_group='mistral', measure='bits_per_byte', on='fineweb'),
            _TEKKEN,
            _TEKKEN | dict(on='fineweb'),
        ],
    )
)

DATA = {}
RUNS = []
for _name, (_tokenizer, _tokens, _steps) in _TOKENIZERS.items():
    _english = f'data/vocabulary_{_name}'
    _fineweb = f'data/vocabulary_fineweb_{_name}'
    _text = f'{_FOLDER}/english_edu.jsonl.xz@{_tokens}'
    DATA |= {_english: _ENGLISH | dict(dataset=_text, tokenizer=_tokenizer)}
    DATA |= {_fineweb: _FINEWEB | dict(tokenizer=_tokenizer)}
    _common = dict(group=_name, config='config/mhf_tiny.py', loss='exact', seeds=(1, 2, 3))
    _common |= dict(beta2=0.95, embedding_lr_mult=1.0, encoder_init='normal', embedding_scale=1.0)
    _common |= dict(num_lsh=0, single_id=False, ablation='')
    _common |= dict(beta1=0.9, weight_decay=0.1, grad_clip=1.0, lr_decay_steps=0)
    _common |= dict(micro_batch_size=8, compile=False, deterministic=True)
    _common |= dict(train=_english, texts=dict(english=_english, fineweb=_fineweb))
    _common |= dict(max_steps=_steps, eval_interval=_steps // 2, warmup_steps=_steps // 10)
    RUNS += [_common | model for model in _MODELS]
RUNS += [_common | model for model in (_TUNED_H4, _SMALL)]
