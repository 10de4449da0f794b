# For expand.py: the tokenizer of study/expansion.py, mistral with 15,354 tokens of three languages.
# It learns from up to 30 MB per language. The corpora are not part of this repository: name your own by --corpora.
base_tokenizer = 'mistral'
tokenizer = 'out/tokenizer/tiny_ar_zh_hi.model'
corpora = ','.join(f'../shared/data/text/{_name}.jsonl.xz' for _name in ('ar', 'zh', 'hi'))
