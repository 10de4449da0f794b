# The two additions of README.md, with the settings of study/RESULTS.md, which were found with small models. Name
# it after a config: python train.py config/mhf_100m.py config/additions.py --out_dir=out/mhf_100m_additions
# For Standard, use --embedding_scale=4.

# informed signatures: in a short run, tokens that share a form, a shape or a frequency learn from each other. If the
# model will learn other languages, name a prepared folder with text of all languages instead
counts_from = 'train'
# the paper's loss makes P(w) overconfident; the exact loss trains the distribution that is sampled from
loss = 'exact'
# with the paper's W_s (std 0.02) a token enters the residual stream at a much smaller scale than its rows of E
encoder_init = 'orthogonal'
embedding_scale = 8.0
# in a short run, most rows of E get few updates
embedding_lr_mult = 4.0
# 0.999 averages over more steps than a short run has
beta2 = 0.99
