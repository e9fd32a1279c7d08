"""
Helps to test tft and its plugins: a fake job whose ranks do what a test says, an adaptor without a
framework, and the tests that every adaptor must pass.
"""
