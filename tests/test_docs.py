"The docs site as tools/docs.py builds it: what the pages hold, and how they do in a real browser."
import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

for package in ('nbdev', 'sphinx', 'myst_nb', 'sphinx_book_theme', 'sphinx_copybutton', 'pypandoc', 'yaml', 'bs4'): pytest.importorskip(package)

import yaml
from bs4 import BeautifulSoup, NavigableString
from test_report import Browser, needs_browser

root = Path(__file__).resolve().parents[1]

def run(project): return subprocess.run([sys.executable, project/'tools/docs.py'], cwd=project, capture_output=True, text=True, env={**os.environ, 'OMP_NUM_THREADS': '1'})

def copy_project(dest, nbs=True):
    "What the site is made of, copied to `dest`"
    for d in ('tools/docs', 'kshot_nas', *['nbs']*nbs): shutil.copytree(root/d, dest/d)
    for f in ('settings.ini', '_quarto.yml', 'tools/docs.py'): shutil.copy(root/f, dest/f)
    return dest

def small_project(dest, **nbs):
    "A project of the notebooks `nbs`, each a list of cells"
    (copy_project(dest, nbs=False)/'nbs/images').mkdir(parents=True)
    contents = ['index.ipynb', dict(section='More', contents=[f'{n}.ipynb' for n in nbs if n != 'index'])]
    (dest/'_quarto.yml').write_text(yaml.safe_dump(dict(website=dict(sidebar=dict(contents=contents)))))
    kernel = dict(kernelspec=dict(display_name='python3', language='python', name='python3'))
    for name,cells in nbs.items():
        cells = [dict(id=f'c{i}', metadata={}, **c) for i,c in enumerate([text('# A title\n\n> and more'), *cells])]
        file = dest/f'nbs/{name}.ipynb'
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(dict(cells=cells, metadata=kernel, nbformat=4, nbformat_minor=5)))
    return dest

def text(source): return dict(cell_type='markdown', source=source)
def code(source, printed=''): return dict(cell_type='code', source=source, execution_count=1, outputs=[dict(output_type='stream', name='stdout', text=printed)])

@pytest.fixture(scope='session')
def site(tmp_path_factory):
    project = copy_project(tmp_path_factory.mktemp('project'))
    res = run(project)
    assert res.returncode == 0 and 'WARNING' not in res.stderr, res.stderr[-3000:]
    return project/'_docs'

@cache
def soup(page): return BeautifulSoup(page.read_text(encoding='utf-8'), 'html.parser')
@cache
def anchors(page): return {tag['id'] for tag in soup(page).find_all(id=True)}
def pages(site): return [p for p in sorted(site.rglob('*.html')) if p.name != 'search.html' and '_static' not in p.parts]
def name_of(site, page): return page.relative_to(site).as_posix()
def sidebar(site): return yaml.safe_load((site.parent/'_quarto.yml').read_text())['website']['sidebar']['contents']

def problems(site):
    "What is wrong with the pages: links, pictures, and text that should have been turned into something else"
    for page in pages(site):
        name = name_of(site, page)
        for tag in soup(page).find_all(lambda t: t.get('href') or t.get('src')):
            url = tag.get('href') or tag['src']
            if re.match('[a-z]+:', url):
                if tag.name != 'a': yield f'{name} loads {url}'
                continue
            file,_,anchor = url.partition('#')
            file = (page.parent/file.partition('?')[0]).resolve() if file else page
            if not file.is_file(): yield f'{name} points to {url}: no such file'
            elif anchor and anchor not in anchors(file): yield f'{name} points to {url}: no such anchor'
        for string in soup(page).body.find_all(string=True):
            if type(string) is not NavigableString: continue
            inside = {p.name for p in string.parents}
            marks = r'\]\(http' if 'pre' in inside else r'#\||:::|\$\$|\$[^$\s]([^$]*[^$\s])?\$(?!\d)|\]\(|\{[.#]?[\w-]+=|\\[a-z]+'
            if inside & {'code', 'script', 'style', 'annotation'}: continue
            if re.search(marks, string): yield f'{name} has raw text: {string.strip()[:200]}'

def test_pages_are_sound(site): assert list(problems(site)) == []

@pytest.mark.parametrize('html, told', [
    ('<a href="nowhere.html">x</a>', 'no such file'), ('<a href="#nowhere">x</a>', 'no such anchor'), ('<img src="no.png">', 'no such file'),
    ('<script src="https://example.org/x.js"></script>', 'loads'), ('<img src="https://example.org/x.png">', 'loads'),
    ('<p>#| hide</p>', 'raw'), ('<p>::: {.column}</p>', 'raw'), ('<p>then $K$ of them</p>', 'raw'), ('<p>$$x=1$$</p>', 'raw'), ('<math><mi>\\arg</mi></math>', 'raw'), ('<p>[a](b)</p>', 'raw')])
def test_problems_are_found(tmp_path, html, told):
    (tmp_path/'index.html').write_text(f'<html><body><p>about 5$ <code>$x$ #|</code></p>{html}</body></html>')
    found, = problems(tmp_path)
    assert told in found

def test_every_page_of_the_sidebar(site):
    files = [f.replace('.ipynb', '.html') for o in sidebar(site) for f in ([o] if isinstance(o, str) else o['contents'])]
    assert set(files) == {name_of(site, p) for p in pages(site)} and files[0] == 'index.html'
    names = [re.sub(r'(^|/)\d+_', r'\1', f) for f in files]
    assert len(set(names)) == len(names), 'Quarto would write two notebooks to one page'
    nav = soup(site/'index.html').find('nav', class_='bd-links')
    assert [a['href'] for a in nav.find_all('a') if a['href'] != '#'] == files[1:]
    assert [c.text for c in nav.find_all(class_='caption')] == [o['section'] for o in sidebar(site) if isinstance(o, dict)]

def test_pages_hold_what_the_notebooks_do(site):
    for page in pages(site):
        name = name_of(site, page)
        cells = json.loads((site.parent/'_proc'/name.replace('.html', '.ipynb')).read_text())['cells']
        outputs = [o.get('data', {}) for c in cells for o in c.get('outputs', [])]
        article = soup(page).find('article')
        assert len(article.select('.cell_output img')) == sum('image/png' in o for o in outputs), f'{name} lacks pictures'
        assert len(article.select('a.source')) == sum('show_doc(' in ''.join(c['source']) for c in cells), f'{name} lacks API entries'
        assert len(article.select('.cell_output table.dataframe')) == sum('class="dataframe"' in ''.join(o.get('text/html', '')) for o in outputs), f'{name} lacks tables'

def test_what_quarto_understands(tmp_path):
    "Callouts, folded, shown and hidden code, figure attributes, formulas, links with anchors, from folder to folder"
    proj = small_project(tmp_path, index=[
        text('::: {.callout-tip title="Mind"}\nThe $\\lambda$ gap.\n:::\n\n::: {.callout-warning}\n## Or not\nStay.\n:::'),
        text('![A picture](images/x.png){fig-align="center" fig-alt="so so" width=40px}'),
        code('#| echo: false\n1+1', 'echoed'), code('#| code-fold: true\n2+2', 'folded'), code('#| exports\n3+3', 'shown'),
        text('[there](wing/01_more.ipynb#k-and-v2.0-now), `_version`')],
        **{'02_near': [text('[far](wing/01_more.ipynb), `Arch`')], 'wing/01_more': [
            text('## K, and `v2.0`: now!'), text('$$\\begin{aligned}a&=\\log b\\\\c&=d\\end{aligned}$$'), text('costs $5 or $6'),
            text('[near](../02_near.ipynb), ![](../images/x.png)')]})
    shutil.copy(root/'nbs/images/report.png', proj/'nbs/images/x.png')
    res = run(proj)
    assert res.returncode == 0, res.stderr
    index,near,more = (soup(proj/f'_docs/{f}.html').article for f in ('index', '02_near', 'wing/01_more'))
    assert [t.text for t in index.select('div.admonition > .admonition-title')] == ['Mind', 'Or not'] and index.select('div.tip')
    assert '1+1' not in index.text and 'echoed' in index.text and '2+2' in index.details.text
    assert '3+3' in index.text and '3+3' not in index.details.text and 'Exported source' not in index.text
    assert index.img['alt'] == 'A picture' and '40px' in index.img['style']
    assert index.find('a', string='there')['href'].startswith('wing/01_more.html#')
    assert near.find('a', string='far')['href'] == 'wing/01_more.html' and more.find('a', string='near')['href'] == '../02_near.html'
    assert not index.select('a code'), 'a private name was linked'
    assert len(more.select('math')) == 1 and len(more.select('mtr')) == 2 and 'costs $5 or $6' in more.text
    assert list(problems(proj/'_docs')) == []

def test_a_fault_ends_the_build(tmp_path):
    res = run(small_project(tmp_path, index=[text(fault) for fault in ('[gone](00_gone.ipynb)', '![](images/gone.png)', '::: {.wide}\nx\n:::', '$\\nosuchthing$')]))
    assert res.returncode != 0 and not (tmp_path/'_docs').exists()
    for told in '00_gone.ipynb', 'gone.png', '.wide', 'nosuchthing': assert told in res.stderr

def test_directives_and_names_of_pages():
    spec = importlib.util.spec_from_file_location('docs', root/'tools/docs.py')
    docs = importlib.util.module_from_spec(spec); spec.loader.exec_module(docs)
    assert docs.convert(dict(metadata={}, **code('#| echo: false\n1')), None)['metadata'] == dict(tags=['remove-input'])
    with pytest.raises(ValueError, match='fig-cap: x'): docs.convert(dict(metadata={}, **code('#| fig-cap: x\n1')), None)
    pages = {'index.ipynb': 'index.html', '10_lowrank.ipynb': 'lowrank.html', 'study/47_bench.ipynb': 'study/bench.html'}
    assert {f: docs.page_of(f) for f in pages} == pages

@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    res = Browser(tmp_path_factory.mktemp('profile'))
    yield res
    res.close()

def complaints(browser):
    "Errors in the console, and requests that leave the machine"
    console = [e for e in browser.of('Runtime.consoleAPICalled') if e['type'] not in ('log', 'info')] + browser.of('Runtime.exceptionThrown', 'Log.entryAdded')
    return console + [e['request']['url'] for e in browser.of('Network.requestWillBeSent') if not e['request']['url'].startswith(('file:', 'data:'))]

def until(browser, expression, seconds=20):
    "Wait for JavaScript `expression` to become true; between two pages there is nothing to ask"
    for _ in range(seconds*20):
        with contextlib.suppress(AssertionError):
            if browser.js(expression): return
        time.sleep(0.05)
    pytest.fail(f'waited in vain for {expression}')

@needs_browser
def test_search_in_the_browser(browser, site):
    browser.open(site/'index.html')
    browser.js('document.querySelector(".bd-sidebar-primary .search-button__button").click()')
    until(browser, 'document.activeElement.type == "search"')
    browser('Input.insertText', text='simplex')
    for kind in 'keyDown', 'keyUp': browser('Input.dispatchKeyEvent', type=kind, key='Enter', code='Enter', windowsVirtualKeyCode=13, text='\r')
    until(browser, 'location.pathname.endsWith("search.html") && !!document.querySelector("#search-results a[href*=simplex]")')
    browser.js('document.querySelector("#search-results a[href*=simplex]").click()')
    until(browser, 'location.pathname.endsWith("simplex.html") && document.readyState == "complete"')
    assert browser.js('[...document.querySelectorAll("article math")].every(m => m.getBoundingClientRect().width > 3 && m.getBoundingClientRect().height > 3)')
    assert browser.js('document.querySelectorAll("article .formula math").length') > 0
    assert browser.js('document.querySelectorAll("article .cell_output img").length') > 0
    assert browser.js('[...document.images].every(i => i.complete && i.naturalWidth > 0)')
    assert complaints(browser) == []

@needs_browser
def test_no_page_is_wider_than_a_phone(browser, site):
    browser('Emulation.setScriptExecutionDisabled', value=True)               # twice as fast
    try:
        for page in pages(site):
            browser.open(page, width=400)
            assert browser.js('document.documentElement.scrollWidth') == 400, name_of(site, page)
            assert complaints(browser) == [], name_of(site, page)
    finally: browser('Emulation.setScriptExecutionDisabled', value=False)

@needs_browser
@pytest.mark.parametrize('width', [1200, 400])
@pytest.mark.parametrize('dark', [False, True])
def test_light_and_dark(browser, site, width, dark):
    browser.open(site/'index.html', width, dark)
    r,g,b = map(int, re.findall(r'\d+', browser.js('getComputedStyle(document.body).backgroundColor'))[:3])
    assert (r + g + b < 150) == dark
    assert browser.js('document.documentElement.scrollWidth') == width
    assert complaints(browser) == []

@needs_browser
def test_the_browser_would_have_told(browser, tmp_path):
    (tmp_path/'bad.html').write_text('<img src="http://localhost:9/x.png"><p style="width:900px">wide</p><script>console.error("oh"); nothing()</script>')
    browser.open(tmp_path/'bad.html', width=400)
    until(browser, 'document.readyState == "complete"')
    assert browser.js('document.documentElement.scrollWidth') > 400
    assert 'http://localhost:9/x.png' in complaints(browser) and len(complaints(browser)) >= 3
