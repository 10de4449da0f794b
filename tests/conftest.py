"""
Helpers for the tests of the scripts. run() runs a script as a user does, but in a child forked from a process that has
already imported torch and other libraries: 3 seconds of imports would otherwise dominate each test.
"""

import ast
import atexit
import hashlib
import json
import math
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

import pytest

from configurator import find_settings

# on a CPU, Triton interprets the kernels of mhf/kernels.py; Triton reads the variable when it is imported
os.environ.setdefault('TRITON_INTERPRET', '1')
REPO = Path(__file__).resolve().parent.parent


# -----------------------------------------------------------------------------
# scripts

# variables of every script, set in the fork server, because libraries read them when they are imported
ENVIRONMENT = dict(HF_HUB_OFFLINE='1', CUDA_VISIBLE_DEVICES='', OMP_NUM_THREADS='1', TORCHINDUCTOR_COMPILE_THREADS='1')
# the libraries that the scripts import; every child imports our own modules itself
PRELOADED = """
    pytest numpy torch torch.distributed torch.nn.parallel torch.utils.checkpoint torch.utils.flop_counter torch._dynamo
    safetensors.torch mmh3 tiktoken sentencepiece mistral_common.tokens.tokenizers.tekken huggingface_hub datasets
    pyarrow.parquet zstandard filelock tqdm matplotlib.pyplot transformers lm_eval.tasks lm_eval.api.model
    lm_eval.evaluator
""".split()


def fork_server():
    """Returns a context whose processes are forked from one that has imported PRELOADED."""
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        multiprocessing.forkserver.ensure_running()
    return context


def child(script, args, cwd, environment, patch, output):
    """Runs `python script args`, or `python -m script args`, in a forked process."""
    atexit._clear()  # the parent's
    # a process group of its own, which can be killed with all its workers
    os.setsid()
    # pytest may run under nohup or in the background
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # multiprocessing forbids a daemon to start processes
    multiprocessing.current_process().daemon = False
    for number, name in ((1, 'stdout'), (2, 'stderr')):
        with open(f'{output}/{name}', 'wb') as file:
            os.dup2(file.fileno(), number)
    sys.stdout = sys.__stdout__ = open(1, 'w', encoding='utf-8', closefd=False)
    sys.stderr = sys.__stderr__ = open(2, 'w', encoding='utf-8', errors='backslashreplace', buffering=1, closefd=False)
    os.chdir(cwd)
    os.environ.update(environment)
    sys.argv = [script, *args]
    try:
        exec(patch, {})
        if script.endswith('.py'):
            runpy.run_path(str(REPO / script), run_name='__main__')
        else:
            runpy.run_module(script, run_name='__main__', alter_sys=True)
    except (Exception, KeyboardInterrupt) as e:
        sys.excepthook(type(e), e, e.__traceback__)
        if isinstance(e, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(1)
    finally:
        # Python calls these two when it exits, multiprocessing does not
        threading._shutdown()
        atexit._run_exitfuncs()


class Forked:
    """
    A script, 'train.py' or a module like 'study.sweep', in a process group of its own. The child first runs `patch`,
    Python that changes our modules.
    """

    def __init__(self, script, *args, cwd, patch='', **environment):
        self.output = tempfile.TemporaryDirectory()
        for name in ('stdout', 'stderr'):
            Path(self.output.name, name).touch()
        everything = (script, args, str(cwd), environment, patch, self.output.name)
        # a daemon does not outlive pytest
        self.process = fork_server().Process(target=child, args=everything, daemon=True)
        self.process.start()
        self.pid = self.process.pid

    @property
    def returncode(self):
        return self.process.exitcode

    def communicate(self):
        """Waits for the end of the script. Returns a subprocess.CompletedProcess."""
        self.process.join(300)
        if self.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
            raise TimeoutError
        output = (Path(self.output.name, name).read_text(encoding='utf-8') for name in ('stdout', 'stderr'))
        return subprocess.CompletedProcess('', self.returncode, *output)


def started(script, *args, cwd, wait_for, **options):
    """Starts a script and waits until it has written the file `wait_for` or has ended. Returns a Forked."""
    process = Forked(script, *args, cwd=cwd, **options)
    deadline = time.monotonic() + 120
    while not (cwd / wait_for).exists() and time.monotonic() < deadline and process.returncode is None:
        time.sleep(0.02)
    return process


def run(*args, **options):
    """Runs a script to its end; the arguments are those of Forked. Returns a subprocess.CompletedProcess."""
    return Forked(*args, **options).communicate()


def ok(*args, **options):
    """Calls run() and asserts that the script succeeds."""
    [done] = succeed([Forked(*args, **options)])
    return done


def succeed(processes):
    """Waits for processes, which must succeed. Returns their subprocess.CompletedProcess."""
    all_done = [process.communicate() for process in processes]
    for done in all_done:
        assert done.returncode == 0, done.stderr[-3000:]
    return all_done


def refused(*args, says, **options):
    """Runs a script, which must end with exit code 1 and one line `error: ...` that contains `says`. Returns it."""
    done = run(*args, **options)
    assert done.returncode == 1, (done.stdout, done.stderr)
    # progress bars are not part of the error
    lines = [line for line in done.stderr.splitlines() if line.strip() and '%|' not in line]
    assert len(lines) == 1 and lines[0].startswith('error: ') and says in lines[0], done.stderr
    return lines[0]


def default_settings(script):
    """Returns {name: default} of a script's settings."""
    return {name: ast.literal_eval(node.value) for name, node in find_settings(script).items()}


def rank_variables(number):
    """Returns the variables that torchrun sets for each of `number` processes, without RANK."""
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    return dict(WORLD_SIZE=str(number), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))


def ranks(number, script, *args, **options):
    """Starts `number` processes of one run as torchrun would. Returns a list of Forked."""
    variables = rank_variables(number)
    return [Forked(script, *args, **variables, **options, RANK=str(rank)) for rank in range(number)]


# -----------------------------------------------------------------------------
# a small run

CONFIG = """
# the small run of these tests
_d = 32  # private to this file
out_dir = 'out'
dataset = 'docs.jsonl'
data_dir = 'bins'
val_fraction = 0.25
num_layers = 2
num_heads = 2
num_kv_heads = 1
head_dim = _d // 2
hidden_size = _d
intermediate_size = 64
num_hashes = 3
num_buckets = 256
loss = 'exact'
encoder_init = 'orthogonal'
embedding_scale = 8.0
block_size = 16
batch_size = 8
micro_batch_size = 4
learning_rate = 1e-2
max_steps = 24
warmup_steps = 4
eval_interval = 8
device = 'cpu'
dtype = 'float32'
max_new_tokens = 20
num_samples = 2
"""


def library_texts(size=math.inf):
    """Returns a list of texts, modules of the standard library, of about `size` characters in total."""
    texts = []
    for path in sorted(Path(sysconfig.get_paths()['stdlib']).glob('*.py')):
        if size < 0:
            break
        texts.append(path.read_text(encoding='utf-8', errors='replace'))
        size -= len(texts[-1])
    return texts


def real_documents():
    """Returns 30 modules of the standard library."""
    return [t for t in map(str.strip, library_texts()) if 1000 < len(t) < 12000][:30]


def write_rows(path, rows):
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows), encoding='utf-8')


def write_jsonl(path, texts):
    write_rows(path, [dict(text=text, id=i) for i, text in enumerate(texts)])


@pytest.fixture(scope='session')
def mistral():
    from mhf.tokenizers import get_tokenizer

    return get_tokenizer('mistral')


@pytest.fixture(scope='session')
def trained(tmp_path_factory):
    """A folder with documents, a config, shards, and a checkpoint of 24 steps, which are three epochs."""
    folder = tmp_path_factory.mktemp('trained')
    write_jsonl(folder / 'docs.jsonl', [text[:1200] for text in real_documents()[:3]])
    (folder / 'cfg.py').write_text(CONFIG)
    ok('prepare.py', 'cfg.py', cwd=folder)
    ok('train.py', 'cfg.py', cwd=folder)
    return folder


@pytest.fixture
def quick(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / 'quick')


def events(folder, out='out'):
    """Returns the events of a run's log."""
    return [json.loads(line) for line in (folder / out / 'log.jsonl').read_text().splitlines()]


def steps(folder, out='out'):
    """Returns the training events of a run's log, without their speed."""
    keys = ('step', 'tokens', 'loss', 'lr', 'grad_norm')
    return [{k: e[k] for k in keys} for e in events(folder, out) if 'loss' in e]


def weights(folder, out='out'):
    """Returns the contents of a run's newest checkpoint."""
    import torch

    return torch.load(folder / out / 'ckpt.pt', weights_only=True)


def assert_same(a, b):
    """Asserts that nested dicts and lists of tensors and values are bit-identical."""
    import torch

    torch.testing.assert_close(a, b, rtol=0, atol=0)


def snapshot(folder):
    """Returns {path: digest of its contents, None for a folder} of everything in a folder but locks."""
    paths = sorted(path for path in folder.rglob('*') if path.suffix != '.lock')
    digests = {p: hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else None for p in paths}
    return {str(p.relative_to(folder)): digest for p, digest in digests.items()}


# -----------------------------------------------------------------------------
# evaluation


# three choices, then the index of the right one, which is the longest; in two of four it is the first
QUESTIONS = [('alpha 1', 'b', 'cc', 0), ('a', 'beta 2', 'c', 1), ('aa', 'b', 'gamma 3', 2), ('delta', 'bb', 'cc', 0)]
TWO_CHOICES = [q for q in QUESTIONS if q[3] < 2] + [('x', 'yyy', '', 1)]
LAMBADA = [dict(text=f'he went to the old {w}') for w in ('house', 'river', 'garden', 'school')]
SCIQ = ('long right', 'd', 'other right', 'e')


def small_tasks(folder):
    """Writes a few documents for each of the paper's tasks in the hub's schema. Returns the right continuations."""
    letters = 'ABCD'
    labeled = [dict(choices=dict(text=q[:3], label=list('ABC')), answerKey=letters[q[3]], id=q[0]) for q in QUESTIONS]
    arc = [dict(question='Which?', **fields) for fields in labeled] * 3
    openbook = [dict(question_stem='It is', **fields) for fields in labeled] * 3
    race = [[dict(question='Which?', answer=letters[q[3]], options=[*q[:3], 'z'])] for q in QUESTIONS]
    hella = dict(ind=0, activity_label='Act', ctx_a='He', ctx_b='runs', ctx='He runs', split='', split_type='')
    hella |= dict(source_id='')
    copa = dict(premise='It rained.', question='cause', idx=0)
    sciq = dict(question='Which?', distractor1='aa', distractor2='b', distractor3='cc', support='S.')
    siqa = dict(context='C.', question='Q?')
    record = dict(passage='Text.\n@highlight\nOne', query='It was @placeholder .', idx=dict(passage=0, query=0))
    record |= dict(entity_spans=dict(text=[], start=[], end=[]))
    tasks = {
        'lambada_openai_test': LAMBADA,
        'lambada_standard_test': LAMBADA,
        'arc_easy_train': arc,
        'arc_easy_test': arc,
        'openbookqa_train': openbook,
        'openbookqa_test': openbook,
        'copa_validation': [dict(copa, choice1=a, choice2=b, label=right) for a, b, _, right in TWO_CHOICES],
        'piqa_validation': [dict(goal='Do.', sol1=a, sol2=b, label=right) for a, b, _, right in TWO_CHOICES],
        'hellaswag_validation': [dict(hella, endings=[*q[:3], 'z'], label=str(q[3])) for q in QUESTIONS],
        'race_high_test': [dict(article='Text.', problems=str(problems)) for problems in race],
        'sciq_validation': [dict(sciq, correct_answer=answer) for answer in SCIQ],
        'social_i_qa_validation': [
            dict(siqa, answerA=a, answerB=b, answerC=c, label=str(right + 1)) for a, b, c, right in QUESTIONS * 3
        ],
        'record_validation': [dict(record, entities=q[:3], answers=[q[q[3]]]) for q in QUESTIONS],
    }
    for name, rows in tasks.items():
        write_rows(folder / f'{name}.jsonl', rows)
    right = {q[q[3]] for q in (*QUESTIONS, *TWO_CHOICES)} | {row['text'].split()[-1] for row in LAMBADA} | set(SCIQ)
    return right | {f'- It was {q[q[3]]} .' for q in QUESTIONS}
