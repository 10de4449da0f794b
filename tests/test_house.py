"""Imports point one way, scripts -> mhf/ -> model, hashing -> configurator, without a cycle."""

import ast

from conftest import REPO

SCRIPTS = {'train', 'prepare', 'sample', 'eval', 'expand', 'bench'}
GROUND = {'configurator': set(), 'hashing': {'configurator'}, 'model': {'configurator'}}


def imported(path):
    """The modules of this repository that a file imports, anywhere in it: mhf.fused, model, study.rows ..."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # from mhf import kernels: a module; from mhf.data import Bins: not one
            names |= {f'{node.module}.{alias.name}' for alias in node.names} | {node.module}
    there = {'.'.join(file.relative_to(REPO).with_suffix('').parts) for file in REPO.glob('[!.]*/*.py')}
    there |= {file.stem for file in REPO.glob('*.py')}
    return names & there


def test_imports_point_one_way():
    """No file imports a script, model.py does not need mhf/, and no two files of mhf/ need each other."""
    for name, allowed in GROUND.items():
        assert imported(REPO / f'{name}.py') <= allowed, name
    needs = {}
    for path in (*REPO.glob('mhf/*.py'), *REPO.glob('study/*.py'), *(REPO / f'{name}.py' for name in SCRIPTS)):
        assert not imported(path) & SCRIPTS, path
        if path.parent.name == 'mhf':
            needs[f'mhf.{path.stem}'] = {name for name in imported(path) if name not in GROUND}
    while needs:
        alone = {name for name, others in needs.items() if not others & needs.keys()}
        assert alone, f'a cycle among {sorted(needs)}, or something that is not in mhf/'
        needs = {name: others for name, others in needs.items() if name not in alone}
