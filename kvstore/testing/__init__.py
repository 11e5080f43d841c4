"""The test kit that ships with kvstore: models, conformance suites and fakes. Product code never imports it."""
