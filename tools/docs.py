"""Build the docs site with Sphinx, for machines without Quarto: python tools/docs.py

nbdev processes the notebooks as it does for Quarto, into _proc/. What Sphinx would read differently is rewritten here, and
the pages are written to _docs/. The sidebar is that of _quarto.yml. Any warning is an error.
"""
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import yaml
from docutils.nodes import SkipNode, math, math_block
from nbdev.config import get_config
from nbdev.serve import proc_nbs
from pypandoc import get_pandoc_path
from sphinx.application import Sphinx
from sphinx.util.logging import getLogger

root = Path(__file__).resolve().parents[1]
# What Sphinx calls it; None is what it does anyway
tags = {'echo: false': 'remove-input', 'output: false': 'remove-output', 'include: false': 'remove-cell', 'code-fold: true': 'hide-input',
        'code-fold: show': None, 'code-summary: "Exported source"': None}
linked = r'\[(`[^`]+`)\]\((https?:[^)]+)\)'                                  # what nbdev makes of a name in backticks that it knows

def slug(title):
    "The anchor that Quarto gives to a heading"
    return re.sub(r'^[^a-z]+', '', re.sub(r'[^\w\s.-]', '', title.lower()).strip().replace(' ', '-'))

def entry(cell):
    "The text that show_doc has written into `cell`, if it has"
    return ''.join(cell['outputs'][0]['data']['text/markdown']) if cell['cell_type'] == 'code' and '\nshow_doc(' in cell['source'] else ''

def markdown(cell, text, api):
    "A markdown cell in place of `cell`: API links by the function `api`, Quarto's callouts as admonitions"
    def callout(m): return f'{m[1]}{{admonition}} {m[3] or m[4] or m[2].title()}\n:class: {m[2]}'
    text = re.sub(r'^(:::+) *\{\.callout-(\w+)(?: title="([^"]*)")?.*\}(?:\n+#+ (.+))?', callout, re.sub(linked, api, text), flags=re.M)
    return dict(id=cell['id'], cell_type='markdown', metadata={}, source=text)

def convert(cell, api):
    "A cell as nbdev hands it to Quarto, as Sphinx wants it"
    text = cell['source']
    if cell['cell_type'] == 'raw':                                           # made of the notebook's title and subtitle
        front = yaml.safe_load(text.strip(' -\n'))
        return markdown(cell, f"# {front['title']}\n\n{{.lead}}\n{front.get('description', '')}", api)
    if entry(cell):
        text = entry(cell).replace('---\n', '', 1).replace('{target=', '{.source target=', 1)
        text = re.sub('^### .+', lambda m: m[0].replace('_', r'\_'), text, flags=re.M)                # __call__ is not a bold "call"
        before,signature,after = text.split('```', 2)
        return markdown(cell, '```'.join([before, re.sub(linked, r'\1', signature), after]), api)
    if cell['cell_type'] == 'markdown': return markdown(cell, text, api)
    directives = re.findall(r'^#\| *(.+?) *$', text, re.M)
    if unknown := [d for d in directives if d not in tags]:
        raise ValueError(f'tools/docs.py knows of {list(tags)} and not of "#| {unknown[0]}"')
    return {**cell, 'source': re.sub(r'^#\|.*\n?', '', text, flags=re.M), 'metadata': dict(tags=[tags[d] for d in directives if tags[d]])}

def page_of(file):
    "The page that nbdev makes of the notebook `file`: its number is left out, its folder is kept"
    return re.sub(r'(^|/)[0-9]+_([^/]+)$', r'\1\2', file).replace('.ipynb', '.html')

def toctree(caption, files): return '\n'.join(['```{toctree}', ':hidden:', f':caption: {caption}', '', *files, '```'])

def setup(app):
    "Sphinx calls this: formulas become MathML, by pandoc as in Quarto, which a browser draws without a script or a network"
    drawn = {}
    def draw(app, doctree):
        nodes = list(doctree.findall(lambda n: isinstance(n, (math, math_block))))
        tex = '\n\n'.join(('$$%s$$' if isinstance(n, math_block) else '$%s$') % n.astext().strip() for n in nodes)
        res = subprocess.run([get_pandoc_path(), '--mathml'], input=tex, capture_output=True, encoding='utf-8', check=True)
        if res.stderr: getLogger(__name__).warning(res.stderr, location=app.env.docname)
        html = re.sub('(<mo>&#8289;</mo>)(?=</mrow><m[in])', r'\1<mspace width="0.17em"></mspace>', res.stdout)    # log p, not logp
        drawn.update(zip([(type(n), n.astext()) for n in nodes], re.findall('<math.*?</math>|<span class="math.*?</span>', html, re.S), strict=True))
    def inline(self, node): self.body.append(drawn[math, node.astext()]); raise SkipNode
    def block(self, node): self.body.append(f'<div class="formula">{drawn[math_block, node.astext()]}</div>'); raise SkipNode
    app.connect('doctree-read', draw)
    app.add_html_math_renderer('mathml', (inline, None), (block, None))
    app.add_css_file('style.css')
    app.add_js_file(None, priority=900, body="DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = location.protocol != 'file:'")    # a file may not fetch others

def main():
    os.chdir(root)
    warnings.filterwarnings('ignore', message='Found cells containing imports')
    cfg,proc = get_config(),proc_nbs(n_workers=0)                            # one process, which imports torch once
    work = proc/'sphinx'
    src,out = work/'src',work/'html'
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(proc, src, ignore=shutil.ignore_patterns('*.ipynb', 'sphinx'))
    contents = yaml.safe_load((root/'_quarto.yml').read_text(encoding='utf-8'))['website']['sidebar']['contents']
    sections = {o['section']: o['contents'] for o in contents if isinstance(o, dict)}
    files = [o for o in contents if isinstance(o, str)] + sum(sections.values(), [])
    nbs = {f: json.loads((proc/f).read_text(encoding='utf-8')) for f in files}
    for nb in nbs.values():
        for c in nb['cells']: c['source'] = ''.join(c['source'])
    urls = {f: f'{cfg.doc_host}{cfg.doc_baseurl}/{page_of(f)}' for f in files}
    entries = {f'{urls[f]}#{s}': f'{f}#{s}' for f,nb in nbs.items() for c in nb['cells'] for s in map(slug, re.findall('^### (.+)', entry(c), re.M))}
    def api(m, folder):
        "A link to an API entry, or to that of the class, seen from `folder`, or none: nbdev also links names that have no entry"
        there = entries.get(m[2]) or entries.get(m[2].rpartition('.')[0])
        if there: return f'[{m[1]}]({posixpath.relpath(there, folder)})'
        return m[1] if m[2].startswith(cfg.doc_host) else m[0]
    for f,nb in nbs.items():
        here = partial(api, folder=posixpath.dirname(f) or '.')
        nb['cells'] = [convert(c, here) for c in nb['cells']]
        if f == 'index.ipynb': nb['cells'].append(dict(id='contents', cell_type='markdown', metadata={}, source='\n\n'.join(toctree(*s) for s in sections.items())))
        (src/f).write_text(json.dumps(nb), encoding='utf-8')
    app = Sphinx(src, None, out, work/'doctrees', 'html', status=None, warningiserror=True, confoverrides=dict(
        project=cfg.title, html_title=cfg.title, author=cfg.author, copyright=cfg.copyright, extensions=['myst_nb', 'sphinx_copybutton', 'docs'],
        html_theme='sphinx_book_theme', html_static_path=[str(root/'tools/docs')], html_copy_source=False, html_use_index=False,
        html_math_renderer='mathml', html_context=dict(default_mode='auto'),
        html_theme_options=dict(repository_url=cfg.git_url, repository_branch=cfg.branch, use_repository_button=True, use_issues_button=True,
                                use_download_button=False, use_fullscreen_button=False, navbar_persistent=[], show_toc_level=2),
        nb_execution_mode='off', nb_merge_streams=True, nb_render_markdown_format='myst', nb_code_prompt_show='Show the code', nb_code_prompt_hide='Hide the code',
        myst_heading_anchors=4, myst_heading_slug_func='docs.slug', myst_update_mathjax=False, myst_dmath_allow_space=False, myst_dmath_allow_digits=False,
        myst_enable_extensions=['dollarmath', 'amsmath', 'colon_fence', 'attrs_inline', 'attrs_block'],
        suppress_warnings=['myst.header']))                                  # API entries are third-level headings, wherever they stand
    app.build()
    if app.statuscode == 0:
        shutil.rmtree(cfg.doc_path, ignore_errors=True)
        shutil.move(out, cfg.doc_path)
        print(f'wrote {len(files)} pages: open {cfg.doc_path.name}/index.html')
    return app.statuscode

if __name__ == '__main__': sys.exit(main())
