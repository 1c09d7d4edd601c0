"""In place of ml_collections: a dict whose keys are attributes."""


class ConfigDict(dict):
    __getattr__ = dict.__getitem__
