/*
 * What others have named, made fit for a line of ours: a value, a path or a program's name may hold a newline that would forge a
 * line, or a control sequence that would recolour a terminal. Used by the shim in everything that it says, and by the tools.
 * No allocation, no locale; async-signal-safe.
 *
 *   printable ASCII and well-formed UTF-8 beyond it   as it is
 *   newline, tabulator, carriage return               \n \t \r
 *   other control characters (C0, DEL, C1), line and paragraph separators, what changes the direction of writing, and bytes
 *   that are no UTF-8                                  \xNN, a byte each
 *
 * A backslash stays as it is: what is quoted is to be read, not parsed.
 */
#ifndef VRAMSHIM_QUOTE_H
#define VRAMSHIM_QUOTE_H

#include <stddef.h>
#include <stdint.h>

/* How many bytes of s, of at most `left`, make a character that may be shown; 0: the first byte is to be escaped. */
static inline size_t vram_quote_shown(const unsigned char *s, size_t left)
{
    if (s[0] >= 0x20 && s[0] < 0x7f)
        return 1;
    size_t n = s[0] >= 0xf0 && s[0] < 0xf5 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] < 0xc2 || s[0] > 0xf4 || n > left)
        return 0;
    uint32_t c = s[0] & (0xffu >> (n + 1));
    for (size_t i = 1; i < n; i++) {
        if ((s[i] & 0xc0) != 0x80)
            return 0;
        c = c << 6 | (s[i] & 0x3f);
    }
    if ((n == 3 && c < 0x800) || (n == 4 && c < 0x10000) || c > 0x10ffff || (c >= 0xd800 && c < 0xe000))
        return 0; /* overlong, beyond Unicode, half of a pair */
    if (c < 0xa0 || (c >= 0x2028 && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069) || c == 0x200e || c == 0x200f)
        return 0;
    return n;
}

/* Writes the `len` bytes at s so, and a NUL. What does not fit into `cap` bytes (at least 8) is left out, a character as a
 * whole, and "..." stands in its place. Returns the length of the result. */
static inline size_t vram_quote(char *ret, size_t cap, const char *s, size_t len)
{
    static const char hex[] = "0123456789abcdef";
    const unsigned char *from = (const unsigned char *)s;
    size_t at = 0, last = 0; /* last: the end of what leaves room for "..." */
    while (len > 0) {
        char piece[4];
        size_t shown = vram_quote_shown(from, len), n = shown, used = shown ? shown : 1;
        const char *const letter = *from == '\n' ? "n" : *from == '\t' ? "t" : *from == '\r' ? "r" : NULL;
        for (size_t i = 0; i < shown; i++)
            piece[i] = (char)from[i];
        if (!shown) {
            piece[0] = '\\';
            piece[1] = letter ? *letter : 'x';
            piece[2] = hex[*from >> 4];
            piece[3] = hex[*from & 15];
            n = letter ? 2 : 4;
        }
        if (at + n >= cap) {
            for (size_t i = 0; i < 3; i++)
                ret[last + i] = '.';
            at = last + 3;
            break;
        }
        for (size_t i = 0; i < n; i++)
            ret[at + i] = piece[i];
        at += n;
        if (at + 3 < cap)
            last = at;
        from += used;
        len -= used;
    }
    ret[at] = 0;
    return at;
}

#endif
