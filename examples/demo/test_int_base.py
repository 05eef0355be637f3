"""One compiled parser must read every number by itself: the base of one must not be used for the next."""

import unittest

import parse


class IntBase(unittest.TestCase):
    def test_each_number_has_its_own_base(self):
        parser = parse.Parser("{:d}")
        texts = ["1234", "0b1011", "0o17", "0x1f", "1234", "-0x1f"]
        self.assertEqual([parser.parse(text)[0] for text in texts], [1234, 11, 15, 31, 1234, -31])


if __name__ == "__main__":
    unittest.main()
