"""Formats of calls: how families of models write calls of tools into their answers, and coroutines
that read them."""
