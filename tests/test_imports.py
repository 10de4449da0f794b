"""Imports point one way: scripts -> mhf/ -> model, hashing -> configurator."""

import ast

from conftest import REPO

SCRIPTS = {'train', 'prepare', 'sample', 'eval', 'expand', 'bench'}
GROUND = {'configurator': set(), 'hashing': {'configurator'}, 'model': set()}


def imported(path):
    """Returns the modules of this repository that a file imports: mhf.chunked, model, study.rows ..."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # an imported name may be a module: from mhf import kernels
            names |= {f'{node.module}.{alias.name}' for alias in node.names} | {node.module}
    modules = {'.'.join(file.relative_to(REPO).with_suffix('').parts) for file in REPO.glob('[!.]*/*.py')}
    modules |= {file.stem for file in REPO.glob('*.py')}
    return names & modules


def test_imports_point_one_way():
    """No file imports a script, model.py does not import mhf/, and mhf/ has no import cycle."""
    for name, allowed in GROUND.items():
        assert imported(REPO / f'{name}.py') <= allowed, name
    imports = {}
    for path in (*REPO.glob('mhf/*.py'), *REPO.glob('study/*.py'), *(REPO / f'{name}.py' for name in SCRIPTS)):
        assert not imported(path) & SCRIPTS, path
        if path.parent.name == 'mhf':
            imports[f'mhf.{path.stem}'] = {name for name in imported(path) if name not in GROUND}
    while imports:
        leaves = {name for name, imported_names in imports.items() if not imported_names & imports.keys()}
        assert leaves, f'an import cycle among {sorted(imports)}'
        for name in leaves:
            del imports[name]
