"""Code to explain, repair and rewrite, of our own: with a bug each, and without.

Slots as in words.py; braces of the code itself are doubled.
"""

from __future__ import annotations


def _snippets(text: str) -> tuple[str, ...]:
    return tuple(snippet.strip("\n") for snippet in text.split("----\n"))


WITH_BUGS = _snippets(
    r"""
def total(prices):
    sum = 0
    for p in prices:
        sum + p
    return sum
----
def average(numbers):
    return sum(numbers) / len(numbers)

print(average([]))
----
for i in range(1, {small}):
    if i % 2 = 0:
        print(i)
----
def greet(name):
    print("Hello, " + nme)

greet("{name}")
----
numbers = [1, 2, 3]
print(numbers[3])
----
age = input("Your age: ")
if age > {small}:
    print("old enough")
----
def add_item(item, basket=[]):
    basket.append(item)
    return basket
----
def factorial(n):
    return n * factorial(n - 1)

print(factorial({small}))
----
let names = ["{name}", "{name}"];
for (let i = 0; i <= names.length; i++) {{
  console.log(names[i]);
}}
----
function area(w, h) {{
  w * h;
}}
console.log(area({small}, {small}))
----
int main() {{
    int x = {medium}
    printf("%d\n", x);
    return 0;
}}
----
class Dog:
    def __init__(self, name):
        name = name

print(Dog("{name}").name)
----
ages = {{"{name}": {medium}, "{name}": {medium}}}
print(ages["{name}"].upper())
----
with open("notes.txt") as f:
    lines = f.readlines
print(len(lines))
----
x = {large}
while x > 0:
    print(x)
----
SELECT name, COUNT(*) FROM orders WHERE COUNT(*) > {small} GROUP BY name
----
import random
winner = random.choice("{name}", "{name}")
print(winner)
----
values = [{medium}, {small}, {large}]
values = values.sort()
print(values[0])
"""
)

WITHOUT = _snippets(
    r"""
def clamp(x, low, high):
    return max(low, min(x, high))
----
counts = {{}}
for word in text.split():
    counts[word] = counts.get(word, 0) + 1
----
squares = [n * n for n in range({small}) if n % 2 == 1]
----
def gcd(a, b):
    while b:
        a, b = b, a % b
    return a
----
with open("data.csv") as f:
    rows = [line.strip().split(",") for line in f]
----
def is_leap(year):
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
----
const total = items.filter(i => i.price > {medium}).map(i => i.price).reduce((a, b) => a + b, 0)
----
def binary_search(items, target):
    low, high = 0, len(items) - 1
    while low <= high:
        mid = (low + high) // 2
        if items[mid] == target:
            return mid
        if items[mid] < target:
            low = mid + 1
        else:
            high = mid - 1
    return -1
----
try:
    value = int(text)
except ValueError:
    value = {small}
----
SELECT city, AVG(price) FROM flats WHERE rooms >= {small} GROUP BY city ORDER BY AVG(price) DESC
"""
)
