"""The only module that imports the native part, so that its absence is explained in one place."""

try:
    from kvstore.transport import _frames as _frames
except ImportError as err:
    raise ImportError(
        "kvstore's native part is missing. From a checkout run `pip install -e .`; "
        "with a wheel installed, do not start `python -m` inside the checkout (or pass -P)."
    ) from err
