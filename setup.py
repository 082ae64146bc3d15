"Packages kshot_nas from what settings.ini says, with nothing but the standard library and setuptools."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
ini = ConfigParser(delimiters=['='])
ini.read(here/'settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']

statuses = {'3': '3 - Alpha', '4': '4 - Beta', '5': '5 - Production/Stable'}

setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    long_description=(here/'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    author=cfg['author'],
    author_email=cfg['author_email'],
    url=cfg['git_url'],
    keywords=cfg['keywords'],
    license='Apache-2.0',
    classifiers=[
        f"Development Status :: {statuses[cfg['status']]}",
        f"Intended Audience :: {cfg['audience']}",
        f"Natural Language :: {cfg['language']}",
        'Programming Language :: Python :: 3',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
    packages=find_packages(include=[cfg['lib_path'], f"{cfg['lib_path']}.*"]),
    include_package_data=True,
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg['requirements'].split(),
    extras_require={k.removesuffix('_requirements'): v.split() for k, v in cfg.items() if k.endswith('_requirements')},
    entry_points={
        'console_scripts': cfg['console_scripts'].split(),
        'nbdev': [f"{cfg['lib_path']}={cfg['lib_path']}._modidx:d"],
    },
    zip_safe=False,
)
