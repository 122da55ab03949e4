"""What is known of FineWeb's sample of ten billion tokens at the pinned commit: every file's size and SHA-256.

Source: the hub's own listing of HuggingFaceFW/fineweb at 9bb295d (tag v1.4.0).
"""

from __future__ import annotations

FINEWEB_REPO = "HuggingFaceFW/fineweb"

FINEWEB_LICENCE = {
    "licence": "ODC-By 1.0, and the Common Crawl terms of use",
    "licence_url": "https://opendatacommons.org/licenses/by/1-0/",
    "attribution": "FineWeb by Hugging Face, https://huggingface.co/datasets/HuggingFaceFW/fineweb; the licence covers "
    "the collection, the pages in it belong to their authors",
}

FINEWEB_FILES = {
    "sample/10BT/000_00000.parquet": ("6b552ea48424648dc86d00df276f93fdfc55e9ad342ce3e4affc23a3a370792b", 2147292183),
    "sample/10BT/001_00000.parquet": ("6e08e6b25ed415c734c2b7e071afd6e62536f418afba0028c77c225218229c08", 2146714409),
    "sample/10BT/002_00000.parquet": ("37f389ea51e8db23cab8943c1634bfaa9936f09beff25e06dfe173e5b49566ac", 2148105492),
    "sample/10BT/003_00000.parquet": ("fa0fba42d6608dd650f8637cf27ea1362ce80ca8d2506fe1370e6c658455635f", 2147060562),
    "sample/10BT/004_00000.parquet": ("c862bb4620c4a8037872b753e4520abdf2ec01a627bd9cab375f946cf7d21208", 2146566804),
    "sample/10BT/005_00000.parquet": ("7e504858556b556547c79f7e4ed4b1a635a8ff0c7acaba4fc96293043be192fe", 2146969492),
    "sample/10BT/006_00000.parquet": ("956467cb8120d5c4b0ddfb5e1fe2078f1f8bb21018c1e65caecf1c2d381743fd", 2147298995),
    "sample/10BT/007_00000.parquet": ("0c6e3febbf7d56e51dac7594e6c94e7f786a59d4a0f33d5ab5e98aaa49ef32d0", 2148002325),
    "sample/10BT/008_00000.parquet": ("84d7a5c4849034c3f454f5ae387639b1e4083c5554b65148bfc725d37dd64228", 2147398331),
    "sample/10BT/009_00000.parquet": ("fbf1c8ceed24c754dc7be82df4c8a238b54a2865b0542af856662bb6c9f68cd8", 2148338231),
    "sample/10BT/010_00000.parquet": ("69565902f5ac299767d62efb4320377870451072641af58fc320657d9afa5b5c", 2147655539),
    "sample/10BT/011_00000.parquet": ("221ab32081d0a1b712e31b099912a3ea41bf3af568ddb6ce808adc3938a32ab3", 2147091724),
    "sample/10BT/012_00000.parquet": ("34caf1a6bf36a635f58a5bab69c8e34c383dba15aab19d92de852188ba395716", 2147653017),
    "sample/10BT/013_00000.parquet": ("48aa6144f665f98139a14cbc1cc28b976c895efc4e4c1df381cff362dbe96993", 2148275619),
    "sample/10BT/014_00000.parquet": ("7168f92a680b3e28155a6b654ebf235b19bf4d2ab35f91dbab3fb47cbd629a8e", 574962194),
}
