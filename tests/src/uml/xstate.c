/*
 * A library for linux.uml, loaded with LD_PRELOAD. It lets User-Mode Linux set the registers of
 * processors that have more registers than User-Mode Linux supports.
 *
 * User-Mode Linux 6.1 keeps at most 2,696 bytes of a process's extended registers (up to AVX-512
 * and protection keys). The host's PTRACE_SETREGSET accepts only the whole XSAVE area, which is
 * 11,008 bytes on processors with AMX. For a smaller area, it fails with EFAULT (xstateregs_set in
 * arch/x86/kernel/fpu/regset.c). User-Mode Linux then prints "ptrace set fp regs failed, errno =
 * 14" and panics. This library extends the area to its whole length with zeros, the initial state
 * of the additional registers. No program inside uses these registers.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

static long (*next_ptrace)(int, ...);
/* The area is static because linux.uml calls ptrace with a small stack, and has one thread. */
static char area[65536] __attribute__((aligned(64)));
static size_t area_size;

__attribute__((constructor)) static void find_next(void)
{
	next_ptrace = (long (*)(int, ...))dlsym(RTLD_NEXT, "ptrace");
}

long ptrace(enum __ptrace_request request, ...)
{
	va_list arguments;
	va_start(arguments, request);
	int pid = va_arg(arguments, int);
	void *address = va_arg(arguments, void *);
	void *data = va_arg(arguments, void *);
	va_end(arguments);

	if (request != PTRACE_SETREGSET || (long)address != NT_X86_XSTATE)
		return next_ptrace(request, pid, address, data);

	const struct iovec *given = data;
	if (area_size == 0) {
		struct iovec whole = { area, sizeof(area) };
		if (next_ptrace(PTRACE_GETREGSET, pid, address, &whole) < 0)
			return -1;
		area_size = whole.iov_len;
	}
	if (given->iov_len >= area_size)
		return next_ptrace(request, pid, address, data);
	memcpy(area, given->iov_base, given->iov_len);
	memset(area + given->iov_len, 0, area_size - given->iov_len);
	struct iovec whole = { area, area_size };
	return next_ptrace(request, pid, address, &whole);
}
