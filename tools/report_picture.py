"A picture of the first part of a report, for the README: python tools/report_picture.py runs/digits/report.html nbs/images/report.png (needs Chromium)"
import sys
import tempfile
import warnings
from pathlib import Path

warnings.filterwarnings('ignore')
sys.path.insert(0, str(Path(__file__).resolve().parents[1]/'tests'))

from PIL import Image
from test_report import Browser

if __name__ == '__main__':
    page,picture = sys.argv[1:]
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(profile)
        browser.open(page, width=1100)
        browser.screenshot(picture, height=1210)
        browser.close()
    Image.open(picture).convert('RGB').quantize(256).save(picture, optimize=True)
    print(f'{picture}: {Path(picture).stat().st_size//1000} kB')
