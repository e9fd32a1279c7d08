"""
A scripted job with scripted ranks, an adaptor without a framework, and tests for the contract of an
adaptor. Authors of adaptors and plugins can use them too.
"""
