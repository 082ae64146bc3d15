"""Write README.md from nbs/index.ipynb, as it is stored: run the notebook first. Needs nothing but the standard library.

Markdown cells are taken as they are, code cells become fenced code with their stored text output, stored pictures are
written to nbs/images/. `#| hide` leaves a cell out, `#| echo: false` its source, `#| fig-alt` is the text of its picture.
"""
import argparse
import json
import re
from base64 import b64decode
from pathlib import Path

root = Path(__file__).resolve().parents[1]

def fence(text, lang=''): return f'```{lang}\n{text.strip()}\n```'

def render(nb):
    "The text of the README for notebook `nb`, and its pictures as a dict of path to bytes"
    parts,pictures = [],{}
    for cell in nb['cells']:
        src = ''.join(cell['source'])
        if cell['cell_type'] == 'markdown': parts.append(src); continue
        directives = re.findall(r'^#\|\s*(.+?)\s*$', src, re.M)
        if 'hide' in directives: continue
        alt = next((d.split('"')[1] for d in directives if d.startswith('fig-alt:')), '')
        if 'echo: false' not in directives: parts.append(fence(re.sub(r'^#\|.*\n?', '', src, flags=re.M), 'python'))
        for out in cell['outputs']:
            if out['output_type'] == 'stream': parts.append(fence(''.join(out['text']))); continue
            if png := out['data'].get('image/png'):
                path = f'nbs/images/index_{len(pictures)+1}.png'
                pictures[path] = b64decode(''.join(png))
                parts.append(f'![{alt}]({path})')
            elif text := out['data'].get('text/plain'): parts.append(fence(''.join(text)))
    text = '\n\n'.join(p.strip() for p in parts) + '\n'
    text = re.sub(r'\]\((?!https?:|#|nbs/)([^)]+)\)', r'](nbs/\1)', text)     # links of the notebook, seen from the top of the repository
    return '<!-- Written from nbs/index.ipynb by `make readme`: edit that. -->\n\n' + text, pictures

if __name__ == '__main__':
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    text,pictures = render(json.loads((root/'nbs/index.ipynb').read_text(encoding='utf-8')))
    for path,png in pictures.items(): (root/path).write_bytes(png)
    (root/'README.md').write_text(text, encoding='utf-8')
    print(f'wrote README.md and {len(pictures)} picture(s)')
