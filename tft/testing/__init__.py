"""
Helps to test tft and its plugins: a scripted job with scripted ranks, an adaptor without a
framework, and the tests that every adaptor must pass.
"""
