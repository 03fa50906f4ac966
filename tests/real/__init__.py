"""Against a real SGLang, by hand or by an opt-in target: never part of `make test`."""
