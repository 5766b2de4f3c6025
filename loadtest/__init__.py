"""Load tests: sets of prompts by task, and users of Locust that send them."""
